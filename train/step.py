"""One optimizer step: gradients of micro-batches, added up and weighted by supervised tokens, clipped, applied.

The loss of a step is the mean over all supervised tokens of its micro-batches, so accumulating four batches of one
example takes the step of one batch of four. (Averaging the micro-batches' means, as many trainers do, would weight a
short answer's tokens more than a long one's.)
"""

import math
from typing import Callable, Iterable, Optional

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map

from mlx_gemma3n.model import Gemma3n
from train.batching import Batch
from train.loss import summed_cross_entropy, supervised_logits, supervised_positions

AudioEmbeds = Callable[[Gemma3n, Batch], Optional[mx.array]]


def loss_and_gradients(model: Gemma3n, batch: Batch, audio_embeds: AudioEmbeds) -> tuple[mx.array, dict]:
    """
    Args:
        batch: with at least one supervised token.
        audio_embeds: gives the soft tokens `[clips, audio_soft_tokens_per_image, hidden]` of the batch's clips in
            order, or None; called inside the gradient, so that adapters on the audio tower get theirs.

    Returns:
        The loss summed over the supervised tokens, and its gradients by the trainable parameters.
    """
    input_ids, attention_mask = mx.array(batch.input_ids), mx.array(batch.attention_mask)
    positions, targets = (mx.array(x) for x in supervised_positions(batch.labels))

    def loss(parameters: dict) -> mx.array:
        model.update(parameters)
        logits = supervised_logits(model, input_ids, attention_mask, positions, audio_embeds(model, batch))
        return summed_cross_entropy(logits, targets)

    parameters = model.trainable_parameters()
    value, gradients = mx.value_and_grad(loss)(parameters)
    # Tracing left its own placeholders in the model.
    model.update(parameters)
    return value, gradients


def accumulate(model: Gemma3n, micro_batches: Iterable[Batch], audio_embeds: AudioEmbeds) -> tuple[float, int, dict]:
    """Gradients of the mean loss over all supervised tokens of `micro_batches`.

    Returns:
        The loss summed over the supervised tokens, their number, and the gradients of the mean.
    """
    total, tokens, summed = 0.0, 0, None
    for batch in micro_batches:
        value, gradients = loss_and_gradients(model, batch, audio_embeds)
        if summed is not None:
            gradients = tree_map(mx.add, summed, gradients)
        # Evaluated here, else the graphs of all micro-batches would be alive at once.
        mx.eval(value, gradients)
        summed, total, tokens = gradients, total + value.item(), tokens + batch.supervised_tokens
    return total, tokens, tree_map(lambda g: g / tokens, summed)


def apply(
    model: Gemma3n, optimizer: optim.Optimizer, gradients: dict, learning_rate: float, max_grad_norm: Optional[float]
) -> float:
    """Clips `gradients` to `max_grad_norm`, in the 2-norm over all of them, and takes one step.

    Returns:
        The norm before clipping. Where it is not finite, nothing was applied.
    """
    gradients, norm = optim.clip_grad_norm(gradients, math.inf if max_grad_norm is None else max_grad_norm)
    if math.isfinite(norm := norm.item()):
        optimizer.learning_rate = learning_rate
        optimizer.update(model, gradients)
        mx.eval(model.trainable_parameters(), optimizer.state)
    return norm
