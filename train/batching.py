"""Length-bucketed batches: every example once an epoch, neighbours in length together, padded on the right.

Padding is computed and then thrown away, and one long example makes its whole batch long. So examples are sorted by length
and cut into batches, and then the batches are shuffled, not the examples. Where lengths tie, and within windows of a few
batches, the order is random, so that an epoch does not group the same examples as the last one. No mlx and no torch: both
trainers run on the very same batches.
"""

from dataclasses import dataclass, field
from typing import Any, Sequence

import numpy as np

IGNORED = -100
# Lengths are rounded up to this, so that steps come in few shapes: kernels and buffers of a shape are made once.
MULTIPLE = 32
# Batches within which the order is random.
WINDOW = 8


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
    """The batches of an epoch, as indices into `lengths`. The smaller last one is kept, at a random place.

    The same arguments give the same batches.
    """
    rng = np.random.default_rng((seed, epoch))
    lengths = np.asarray(lengths)
    order = np.lexsort((rng.random(len(lengths)), lengths))
    window = WINDOW * batch_size
    # A random shift, else the borders of the windows would be the same each epoch.
    shift = int(rng.integers(window)) if len(order) > window else 0
    borders = [0, *range(shift or window, len(order), window), len(order)]
    order = np.concatenate([rng.permutation(order[a:b]) for a, b in zip(borders, borders[1:])]) if len(order) else order
    groups = [order[i : i + batch_size].tolist() for i in range(0, len(order), batch_size)]
    return [groups[i] for i in rng.permutation(len(groups))]


def collate(examples: Sequence[Any], pad_token_id: int, multiple: int = MULTIPLE) -> Batch:
    """Pads examples (anything with `input_ids` and `labels`, int `[tokens]`) on the right into a batch."""
    longest = max(len(e.input_ids) for e in examples)
    shape = (len(examples), -(-longest // multiple) * multiple)
    input_ids = np.full(shape, pad_token_id, np.int32)
    attention_mask, labels = np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        input_ids[row, :length], labels[row, :length] = example.input_ids, example.labels
        attention_mask[row, :length] = 1
    return Batch(input_ids, attention_mask, labels, tuple(examples))
