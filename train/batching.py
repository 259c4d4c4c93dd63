"""Length-bucketed batches: every example once an epoch, neighbours in length together, padded on the right.

Padding is computed and then thrown away, and one long example makes its whole batch long. So examples are sorted by
length and cut into batches, and then the batches are shuffled. Sorted exactly, the same examples would meet in every
epoch, so each length is first moved by a random few per cent. Of 988 examples of 245 tokens at the median (log-normal,
sigma 0.5), in batches of 4, that makes 10 % of the tokens padding; the exact order makes 6 %, shuffled examples 39 %.
No mlx and no torch: both trainers run on the very same batches.
"""

from dataclasses import dataclass, field
from typing import Any, Sequence

import numpy as np

IGNORED = -100
# Lengths are rounded up to this, so that steps come in few shapes: kernels and buffers of a shape are made once.
MULTIPLE = 32
# The share by which lengths are moved before they are sorted.
JITTER = 0.1


@dataclass(frozen=True)
class Batch:
    """Examples of about one length.

    Args:
        input_ids: int32 `[batch, tokens]`.
        attention_mask: int32 `[batch, tokens]`, 1 on real tokens.
        labels: int32 `[batch, tokens]`, aligned with `input_ids`, -100 where there is nothing to learn.
        examples: what the rows were made of, in order.
    """

    input_ids: np.ndarray
    attention_mask: np.ndarray
    labels: np.ndarray
    examples: tuple[Any, ...] = field(default=())

    @property
    def supervised_tokens(self) -> int:
        """How many labels the loss sums over. The first column is no token's next one."""
        return int((self.labels[:, 1:] != IGNORED).sum())


def batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch, as indices into `lengths`: each index once, nothing dropped.

    The same arguments give the same batches. Where the last batch is incomplete, it is the one of a random place in the
    order of lengths, so that batches are cut elsewhere each epoch.

    Args:
        lengths: tokens of each example, at least 1.
    """
    rng = np.random.default_rng((seed, epoch))
    order = np.argsort(np.asarray(lengths) * (1 + JITTER * rng.uniform(-1, 1, len(lengths))), kind="stable").tolist()
    full, left = divmod(len(order), batch_size)
    sizes = [batch_size] * full
    if left:
        sizes.insert(int(rng.integers(full + 1)), left)
    ends = np.cumsum(sizes).tolist()
    groups = [order[end - size : end] for size, end in zip(sizes, ends)]
    return [groups[i] for i in rng.permutation(len(groups))]


def padded(length: int, multiple: int = MULTIPLE) -> int:
    """The length that a row of `length` tokens is padded to, if it is the longest of its batch."""
    return -(-length // multiple) * multiple


def collate(examples: Sequence[Any], pad_token_id: int, multiple: int = MULTIPLE) -> Batch:
    """Pads examples (anything with `input_ids` and `labels`, int `[tokens]`) on the right into a batch."""
    longest = max(len(e.input_ids) for e in examples)
    shape = (len(examples), padded(longest, multiple))
    input_ids = np.full(shape, pad_token_id, np.int32)
    attention_mask, labels = np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        input_ids[row, :length], labels[row, :length] = example.input_ids, example.labels
        attention_mask[row, :length] = 1
    return Batch(input_ids, attention_mask, labels, tuple(examples))
