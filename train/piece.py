"""One piece of a training step: a few tokens through a part of the model, and its gradient.

Functions of arrays, nothing evaluated, so that a step can run them (`train/passes.py`) and a plan can look at their
graphs (`train/flight.py`): the very same ones.
"""

from contextlib import contextmanager
from typing import Callable, Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.text import DecoderLayer, merge_heads

Gradients = dict[str, mx.array]

# What a layer's part before attention computes. AltUp's predictions are computed in both parts.
BEFORE = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")
BOTH = ("altup.prediction_coefs.", "altup.modality_router.")
# What the streams and the per-layer inputs are made with, and what the streams are merged with.
START = ("altup_projections.", "per_layer_model_projection.")
END = ("altup_unembed_projections.",)


@contextmanager
def own_randomness() -> Iterator[None]:
    """What is drawn or seeded inside leaves MLX's generator as it was before."""
    high, low = mx.random.state[0].tolist()
    try:
        yield
    finally:
        # A state is the two halves of a seed.
        mx.random.seed((high << 32) | low)


def layer_seeds(seed: int, layers: int) -> list[list[int]]:
    """Of each layer, the seeds of the dropout before attention and after it; a piece adds its first token's index."""
    return mx.random.randint(0, 2**30, (layers, 2), key=mx.random.key(seed)).tolist()


def end_seeds(seed: int) -> list[int]:
    """The seeds of the dropout in the embedding, and where the streams start and end; a piece adds its first index."""
    return mx.random.randint(0, 2**30, (3,), key=mx.random.key(seed + 2**30)).tolist()


def trainable(module: nn.Module, choose: Callable[[str], bool] = lambda name: True) -> dict[str, mx.array]:
    """The trainable parameters of a module whose names `choose` picks, by name."""
    return {name: value for name, value in tree_flatten(module.trainable_parameters()) if choose(name)}


def vjp(
    module: nn.Module,
    parameters: dict[str, mx.array],
    function: Callable[..., Sequence[mx.array]],
    inputs: Sequence[mx.array],
    cotangents: Sequence[mx.array],
) -> tuple[Gradients, list[mx.array]]:
    """The vector-Jacobian products of `function`, which reads `module`, by some parameters and by its inputs.

    Everything that needs a gradient is an argument: what a function reads otherwise is a constant to MLX.
    """
    count = len(parameters)

    def run(*arrays: mx.array) -> list[mx.array]:
        module.update(tree_unflatten(list(zip(parameters, arrays[:count]))))
        return list(function(*arrays[count:]))

    if not count and not inputs:
        return {}, []
    _, products = mx.vjp(run, [*parameters.values(), *inputs], list(cotangents))
    # Tracing left its own placeholders in the module.
    module.update(tree_unflatten(list(parameters.items())))
    return dict(zip(parameters, products[:count])), products[count:]


def add(gradients: Gradients, path: str, new: Gradients) -> list[mx.array]:
    """Adds `new`, of the module at `path`, to `gradients`; returns the sums, not evaluated."""
    sums = []
    for name, value in new.items():
        full = f"{path}.{name}" if path else name
        gradients[full] = gradients[full] + value if full in gradients else value
        sums.append(gradients[full])
    return sums


def start_parameters(model: Gemma3n) -> dict[str, mx.array]:
    return trainable(model.language_model, lambda name: name.startswith(START))


def start_gradients(
    model: Gemma3n, input_ids: mx.array, embeds: mx.array, cotangent: mx.array, per_layer_cotangent: mx.array
) -> tuple[Gradients, list[mx.array]]:
    """Of what `start_forward` makes of a few tokens: the gradients of the text model's parameters, and of `embeds`."""
    text = model.language_model
    run = lambda x: [text.streams(x), text.per_layer_inputs(input_ids, x)]
    return vjp(text, start_parameters(model), run, [embeds], [cotangent, per_layer_cotangent])


def end_gradients(model: Gemma3n, rows: mx.array, cotangent: mx.array) -> tuple[Gradients, list[mx.array]]:
    """Of merging the streams of a few rows: the gradients of the text model's parameters, and of the rows."""
    text = model.language_model
    parameters = trainable(text, lambda name: name.startswith(END))
    return vjp(text, parameters, lambda x: [text.merge(x)], [rows], [cotangent])


def before_piece(layer: DecoderLayer, streams: mx.array, offset: int, seed: int) -> tuple[mx.array, ...]:
    """Queries and, unless the layer shares another one's, keys and values of a few tokens; `offset` is the first one's
    position."""
    mx.random.seed(seed + offset)
    return layer.before_attention(layer.altup.predict(streams), offset)


def after_piece(
    layer: DecoderLayer, streams: mx.array, attended: mx.array, per_layer_input: mx.array, offset: int, seed: int
) -> mx.array:
    """The streams of a few tokens after the layer, from those before it and attention `[batch, heads, tokens,
    head_dim]`."""
    mx.random.seed(seed + offset)
    return layer.after_attention(layer.altup.predict(streams), merge_heads(attended), per_layer_input)


def before_gradients(
    layer: DecoderLayer, streams: mx.array, offset: int, seed: int, cotangents: Sequence[mx.array]
) -> tuple[Gradients, list[mx.array]]:
    """Of `before_piece`: the gradients of the layer's parameters, and of the streams."""
    parameters = trainable(layer, lambda name: name.startswith(BEFORE + BOTH))
    return vjp(layer, parameters, lambda x: before_piece(layer, x, offset, seed), [streams], cotangents)


def after_gradients(
    layer: DecoderLayer,
    streams: mx.array,
    attended: mx.array,
    per_layer_input: mx.array,
    offset: int,
    seed: int,
    cotangent: mx.array,
    per_layer_gradient: bool,
) -> tuple[Gradients, list[mx.array]]:
    """Of `after_piece`: the gradients of the layer's parameters, and of streams, attention and, where it is wanted,
    per-layer input."""
    parameters = trainable(layer, lambda name: not name.startswith(BEFORE))
    inputs = [streams, attended, *([per_layer_input] if per_layer_gradient else [])]
    run = lambda x, out, *ple: [after_piece(layer, x, out, *(ple or [per_layer_input]), offset, seed)]
    return vjp(layer, parameters, run, inputs, [cotangent])


def attention_gradients(
    block: Callable[..., mx.array], queries: mx.array, keys: mx.array, values: mx.array, cotangent: mx.array
) -> list[mx.array]:
    """The gradients of queries, keys and values of one block of attention."""
    return mx.vjp(lambda *qkv: [block(*qkv)], [queries, keys, values], [cotangent])[1]
