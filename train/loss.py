"""The next-token loss, on the supervised positions only, a few rows of logits at a time.

One float32 row of logits is 1 MB at Gemma 3n's vocabulary, and a prompt of 188 audio tokens has no label at all. So the
hidden states at the labelled positions are gathered first, and only those meet the vocabulary, in chunks. The gradient
of a cross-entropy is known with its value, so a chunk gives both and its logits are gone before the next chunk's are
there: nothing is kept for the backward pass, and nothing is computed again in it.
"""

from typing import Iterator

import mlx.core as mx
import numpy as np

from mlx_gemma3n.model import Gemma3n
from train.batching import IGNORED


def supervised_positions(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the next token is supervised.

    Args:
        labels: int `[batch, tokens]` aligned with `input_ids`, -100 where there is nothing to learn.

    Returns:
        Flat positions into `[batch * tokens]` whose hidden state predicts a label, and those labels; both
        `[supervised]`.
    """
    batch, tokens = labels.shape
    following = np.concatenate([labels[:, 1:], np.full((batch, 1), IGNORED, labels.dtype)], axis=1).reshape(-1)
    positions = np.flatnonzero(following != IGNORED)
    return positions.astype(np.int32), following[positions].astype(np.int32)


def _chunks(count: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def _cross_entropy(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The loss of each row, its logsumexp and its target's logit, all `[rows, 1]`."""
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)
    return total - chosen, total, chosen


def chunk_loss(model: Gemma3n, hidden: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """The loss of a few rows and its gradient.

    Args:
        hidden: `[rows, hidden]`, after the final norm.
        targets: int32 `[rows]`.

    Returns:
        The loss summed over the rows, float32, and its gradient by `hidden`, `[rows, hidden]`.
    """
    logits = model.logits(hidden)
    loss, total, chosen = _cross_entropy(logits, targets)
    # Softmax minus one at the target, by the slope of the soft cap: 1 - tanh^2.
    slope = mx.put_along_axis(mx.exp(logits - total), targets[:, None], mx.exp(chosen - total) - 1, axis=-1)
    if (cap := model.config.text_config.final_logit_softcapping) is not None:
        slope = slope * (1 - mx.square(logits / cap))
    project = model.language_model.embed_tokens.as_linear
    _, (gradient,) = mx.vjp(project, [hidden], [slope.astype(hidden.dtype)])
    return loss.sum(), gradient


def loss_and_hidden_gradient(
    model: Gemma3n, hidden: mx.array, targets: mx.array, rows: int
) -> tuple[mx.array, mx.array]:
    """The loss summed over all rows, not their mean (micro-batches add up to the batch whatever their share of
    supervised tokens), and its gradient; evaluated, `rows` at a time.

    Args:
        hidden: `[supervised, hidden]`, after the final norm.
        targets: int32 `[supervised]`.
    """
    total, gradient = mx.array(0.0), mx.zeros_like(hidden)
    for part in _chunks(len(targets), rows):
        loss, slope = chunk_loss(model, hidden[part], targets[part])
        mx.eval(loss, slope)
        total, gradient[part] = total + loss, slope
    mx.eval(total, gradient)
    return total, gradient


def summed_loss(model: Gemma3n, hidden: mx.array, targets: mx.array, rows: int) -> mx.array:
    """The same loss, not evaluated, for a function that MLX differentiates."""

    @mx.custom_function
    def both(hidden: mx.array) -> tuple[mx.array, mx.array]:
        losses: list[mx.array] = []
        slopes: list[mx.array] = []
        for part in _chunks(len(targets), rows):
            piece = hidden[part]
            if losses:
                # One chunk after the other: MLX would be free to begin with all of them.
                (piece,) = mx.depends([piece], [losses[-1], slopes[-1]])
            loss, slope = chunk_loss(model, piece, targets[part])
            losses.append(loss)
            slopes.append(slope)
        return mx.stack(losses).sum(), mx.concatenate(slopes)

    @both.vjp
    def _(primals, cotangents, outputs):
        return cotangents[0].astype(outputs[1].dtype) * outputs[1]

    return both(hidden)[0]


def loss_and_choice(model: Gemma3n, hidden: mx.array, targets: mx.array, rows: int) -> tuple[float, np.ndarray]:
    """The loss summed over all rows, and each row's likeliest token, int `[supervised]`; evaluated chunk by chunk."""
    total, choices = 0.0, [np.zeros(0, np.int32)]
    for part in _chunks(len(targets), rows):
        logits = model.logits(hidden[part])
        loss, choice = _cross_entropy(logits, targets[part])[0].sum(), mx.argmax(logits, axis=-1)
        mx.eval(loss, choice)
        total += loss.item()
        choices.append(np.array(choice))
    return total, np.concatenate(choices)
