"""One optimizer step: gradients of micro-batches, added up and weighted by supervised tokens, clipped, applied.

The loss of a step is the mean over all supervised tokens of its micro-batches, so accumulating four batches of one
example takes the step of one batch of four. (Averaging the micro-batches' means, as many trainers do, would weight a
short answer's tokens more than a long one's.)
"""

import math
from dataclasses import dataclass
from typing import Callable, Iterable, Optional

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlx_gemma3n.model import Gemma3n
from train.batching import Batch
from train.loss import loss_and_hidden_gradient, summed_loss, supervised_positions
from train.passes import (
    Kept,
    end_backward,
    end_forward,
    start_backward,
    start_forward,
    supervised_rows,
    text_backward,
    text_forward,
)
from train.piece import Gradients, add, end_seeds, own_randomness, start_parameters, trainable, vjp
from train.trained_audio import TrainedAudio

# Gives the soft tokens `[clips, audio_soft_tokens_per_image, hidden]` of a batch's clips in order, or None.
AudioEmbeds = Callable[[Gemma3n, Batch], Optional[mx.array]] | TrainedAudio


@dataclass(frozen=True)
class Pieces:
    """How a step is cut; what it computes does not depend on it.

    Attributes:
        checkpointing: keep each layer's input only and compute the layer again going backward, or keep everything.
        tokens: how many go through a layer's parts around attention together.
        logits: rows of logits that exist at once.
    """

    checkpointing: bool = True
    tokens: int = 128
    logits: int = 32


def hidden_states(model: Gemma3n, batch: Batch, audio: AudioEmbeds, pieces: Pieces) -> mx.array:
    """`[supervised, hidden]` after the final norm where the next token is supervised, evaluated piece by piece, nothing
    kept."""
    with own_randomness():
        soft = audio.forward(model, audio.decoded(batch), 0) if isinstance(audio, TrainedAudio) else audio(model, batch)
        at_embed, at_start, at_end = end_seeds(0)
        mx.random.seed(at_embed)
        embeds = model.embed(mx.array(batch.input_ids), soft)
        mx.eval(embeds)
        streams, per_layer_inputs = start_forward(model, mx.array(batch.input_ids), embeds, pieces.tokens, at_start)
        del embeds, soft
        streams = text_forward(model, streams, per_layer_inputs, mx.array(batch.attention_mask), pieces.tokens, 0)
        rows = supervised_rows(streams, mx.array(supervised_positions(batch.labels)[0]))
        del streams, per_layer_inputs
        return end_forward(model, rows, pieces.tokens, at_end)


def loss_and_gradients(
    model: Gemma3n, batch: Batch, audio: AudioEmbeds, pieces: Pieces = Pieces(), into: Optional[Gradients] = None
) -> tuple[float, Gradients]:
    """
    Args:
        batch: with at least one supervised token.
        audio: where the soft tokens of its clips come from.
        into: gradients to add this batch's to.

    Returns:
        The loss summed over the supervised tokens, and its gradients by path, added to those of `into`.
    """
    gradients = {} if into is None else into
    if pieces.checkpointing:
        # A step draws one number; from it follow all its masks, drawn twice.
        seed = mx.random.randint(0, 2**30).item()
        with own_randomness():
            return _recomputing(model, batch, audio, pieces, seed, gradients), gradients
    return _keeping(model, batch, audio, pieces, gradients), gradients


def _recomputing(
    model: Gemma3n, batch: Batch, audio: AudioEmbeds, pieces: Pieces, seed: int, gradients: Gradients
) -> float:
    input_ids, attention_mask = mx.array(batch.input_ids), mx.array(batch.attention_mask)
    positions, targets = (mx.array(x) for x in supervised_positions(batch.labels))
    live = isinstance(audio, TrainedAudio)
    # Decoded once for both passes.
    clips = audio.decoded(batch) if live else []
    soft = audio.forward(model, clips, seed) if live else audio(model, batch)

    at_embed, at_start, at_end = end_seeds(seed)
    mx.random.seed(at_embed)
    embeds = model.embed(input_ids, soft)
    mx.eval(embeds)
    streams, per_layer_inputs = start_forward(model, input_ids, embeds, pieces.tokens, at_start)
    embedders = trainable(model, lambda name: name.startswith(("embed_audio.", "embed_vision.")))
    inputs = [soft] if live and soft is not None else []
    # Whether the backward pass goes on before the first layer.
    further = bool(start_parameters(model) or embedders or inputs)
    if not further:
        del embeds, soft
    kept = Kept()
    streams = text_forward(model, streams, per_layer_inputs, attention_mask, pieces.tokens, seed, kept)
    shape, rows = streams.shape, supervised_rows(streams, positions)
    del streams
    hidden = end_forward(model, rows, pieces.tokens, at_end)
    loss, slope = loss_and_hidden_gradient(model, hidden, targets, pieces.logits)
    del hidden

    rows = end_backward(model, rows, slope, pieces.tokens, at_end, gradients)
    cotangent = mx.zeros((shape[0], shape[1] * shape[2], shape[3]), rows.dtype)
    cotangent[:, positions] = rows
    cotangent = cotangent.reshape(shape)
    mx.eval(cotangent)
    del slope, rows
    cotangent, per_layer = text_backward(
        model, kept, per_layer_inputs, attention_mask, pieces.tokens, seed, cotangent, gradients, further
    )
    if further:
        slope = start_backward(model, input_ids, embeds, cotangent, per_layer, pieces.tokens, at_start, gradients)
        del kept, cotangent, per_layer, per_layer_inputs
        run = lambda *given: [model.embed(input_ids, *(given or [soft]))]
        mx.random.seed(at_embed)
        found, slopes = vjp(model, embedders, run, inputs, [slope])
        mx.eval(slopes, add(gradients, "", found))
        if inputs:
            audio.backward(model, clips, seed, slopes[0], gradients)
    return loss.item()


def _keeping(model: Gemma3n, batch: Batch, audio: AudioEmbeds, pieces: Pieces, gradients: Gradients) -> float:
    """MLX's own gradient of the whole, nothing computed twice; evaluated from the last layer down to the first."""
    input_ids, attention_mask = mx.array(batch.input_ids), mx.array(batch.attention_mask)
    positions, targets = (mx.array(x) for x in supervised_positions(batch.labels))
    parameters = trainable(model)

    def loss(parameters: Gradients) -> mx.array:
        model.update(tree_unflatten(list(parameters.items())))
        hidden = model.hidden_states(input_ids, attention_mask=attention_mask, audio_embeds=audio(model, batch))
        return summed_loss(model, hidden.reshape(-1, hidden.shape[-1])[positions], targets, pieces.logits)

    value, found = mx.value_and_grad(loss)(parameters)
    model.update(tree_unflatten(list(parameters.items())))
    mx.eval(value)
    add(gradients, "", found)
    paths = list(found)
    del found
    for i in reversed(range(len(model.layers))):
        # By layers, so that a layer's activations are gone before those before it are met.
        mx.eval([gradients[p] for p in paths if p.startswith(f"language_model.layers.{i}.")])
    mx.eval([gradients[p] for p in paths])
    return value.item()


def accumulate(
    model: Gemma3n, micro_batches: Iterable[Batch], audio: AudioEmbeds, pieces: Pieces = Pieces()
) -> tuple[float, int, dict]:
    """Gradients of the mean loss over all supervised tokens of `micro_batches`.

    Returns:
        The loss summed over the supervised tokens, their number, and the gradients of the mean, as a tree.
    """
    total, tokens, gradients = 0.0, 0, {}
    for batch in micro_batches:
        loss, gradients = loss_and_gradients(model, batch, audio, pieces, gradients)
        total, tokens = total + loss, tokens + batch.supervised_tokens
    for path in gradients:
        gradients[path] = gradients[path] / tokens
        mx.eval(gradients[path])
    return total, tokens, tree_unflatten(list(gradients.items()))


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
        del gradients
        moments: dict[str, list[mx.array]] = {}
        for name, value in tree_flatten(optimizer.state):
            moments.setdefault(name.rpartition(".")[0], []).append(value)
        for path, parameter in trainable(model).items():
            # One by one: of all together, the old values, the new ones and what is between would be alive at once.
            mx.eval(parameter, moments.get(path, []))
        mx.eval(optimizer.state)
    return norm
