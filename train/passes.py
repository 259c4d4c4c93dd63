"""The forward and the backward pass of a training step, evaluated piece by piece.

MLX is lazy: a gradient of the whole model is one graph, and its evaluation allocates far ahead of what is computed. On
Metal and on the CPU alike the memory of such a step is whatever the scheduler makes of it. Here the passes are written
out. A piece is a few operations on a few tokens; its results are evaluated before the next piece is begun, so what is
alive at any moment can be read off this page, and `train/memory.py` counts it.

Of the forward pass only each layer's input is kept, `[altup_inputs, batch, tokens, hidden]`, and the keys and values
that later layers share. Going backward, a layer computes its queries, keys, values and attention again, and then, a few
tokens at a time, the part after attention together with its gradient. That part is three quarters of a layer, and it is
computed twice in all, like everything else under gradient checkpointing (arXiv:1604.06174). The gradient of the keys
and values that a layer shares is added to that of the layer they come from before that one's turn.
"""

from dataclasses import dataclass, field
from typing import Callable, Iterator, Optional, Sequence

import mlx.core as mx

from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.text import DecoderLayer, KeysValues, attend_block, query_blocks
from train.piece import (
    Gradients,
    add,
    after_gradients,
    after_piece,
    attention_gradients,
    before_gradients,
    before_piece,
    end_gradients,
    layer_seeds,
    start_gradients,
)


@dataclass
class Kept:
    """What the forward pass keeps for the backward pass.

    Attributes:
        streams: the input of each layer.
        kv: keys and values of the layers that others share, by layer.
    """

    streams: list[mx.array] = field(default_factory=list)
    kv: dict[int, KeysValues] = field(default_factory=dict)


def parts(tokens: int, batch: int, at_once: int) -> Iterator[slice]:
    """Slices of the token axis, each of about `at_once` tokens over all rows of the batch, at least one of each row."""
    width = max(1, at_once // batch)
    return (slice(start, min(start + width, tokens)) for start in range(0, tokens, width))


def start_forward(
    model: Gemma3n, input_ids: mx.array, embeds: mx.array, at_once: int, seed: int
) -> tuple[mx.array, mx.array]:
    """The streams before the first layer, `[altup_inputs, batch, tokens, hidden]`, and the per-layer inputs
    `[batch, tokens, layers, hidden_size_per_layer_input]`, from embeddings `[batch, tokens, hidden]`; evaluated."""
    text, config, (batch, tokens, hidden) = model.language_model, model.config.text_config, embeds.shape
    streams = mx.zeros((config.altup_num_inputs, batch, tokens, hidden), embeds.dtype)
    shape = (batch, tokens, config.num_hidden_layers, config.hidden_size_per_layer_input)
    per_layer_inputs = mx.zeros(shape, embeds.dtype)
    for part in parts(tokens, batch, at_once):
        mx.random.seed(seed + part.start)
        piece = text.streams(embeds[:, part])
        mx.eval(piece)
        streams[:, :, part] = piece
        del piece
        mx.eval(streams)
        piece = text.per_layer_inputs(input_ids[:, part], embeds[:, part])
        mx.eval(piece)
        per_layer_inputs[:, part] = piece
        del piece
        mx.eval(per_layer_inputs)
    return streams, per_layer_inputs


def start_backward(
    model: Gemma3n,
    input_ids: mx.array,
    embeds: mx.array,
    cotangent: mx.array,
    per_layer_cotangent: mx.array,
    at_once: int,
    seed: int,
    gradients: Gradients,
) -> mx.array:
    """The gradient of `embeds` from those of what `start_forward` gives; adds the parameters' to `gradients`."""
    batch, tokens, _ = embeds.shape
    result = mx.zeros_like(embeds)
    for part in parts(tokens, batch, at_once):
        slopes = cotangent[:, :, part], per_layer_cotangent[:, part]
        mx.random.seed(seed + part.start)
        found, (piece,) = start_gradients(model, input_ids[:, part], embeds[:, part], *slopes)
        mx.eval(piece, add(gradients, "language_model", found))
        result[:, part] = piece
        del slopes, found, piece
        mx.eval(result)
    return result


def supervised_rows(streams: mx.array, positions: mx.array) -> mx.array:
    """Copies streams `[altup_inputs, batch, tokens, hidden]` out at flat positions `[supervised]` of their tokens:
    `[altup_inputs, supervised, hidden]`, evaluated."""
    rows = streams.reshape(streams.shape[0], -1, streams.shape[-1])[:, positions]
    mx.eval(rows)
    return rows


def end_forward(model: Gemma3n, rows: mx.array, at_once: int, seed: int) -> mx.array:
    """Rows of streams to `[supervised, hidden]` after the final norm, evaluated."""
    hidden = mx.zeros(rows.shape[1:], rows.dtype)
    for part in parts(rows.shape[1], 1, at_once):
        mx.random.seed(seed + part.start)
        piece = model.language_model.merge(rows[:, part])
        mx.eval(piece)
        hidden[part] = piece
        del piece
        mx.eval(hidden)
    return hidden


def end_backward(
    model: Gemma3n, rows: mx.array, cotangent: mx.array, at_once: int, seed: int, gradients: Gradients
) -> mx.array:
    """The gradient of `rows`, in their memory, from that of what `end_forward` gives."""
    for part in parts(rows.shape[1], 1, at_once):
        inputs = [rows[:, part]]
        mx.random.seed(seed + part.start)
        found, (piece,) = end_gradients(model, *inputs, cotangent[part])
        mx.eval(piece, add(gradients, "language_model", found))
        rows[:, part] = piece
        del inputs, found, piece
        mx.eval(rows)
    return rows


class Attended:
    """Queries, keys, values and attention of one layer, computed piece by piece.

    Attributes:
        queries, out: `[batch, heads, tokens, head_dim]`.
        kv: keys and values `[batch, kv_heads, tokens, head_dim]`, its own or those of its donor.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        streams: mx.array,
        attention_mask: mx.array,
        shared_kv: Optional[KeysValues],
        seed: int,
        at_once: int,
    ):
        _, batch, tokens, _ = streams.shape
        found: list[mx.array] = []
        for part in parts(tokens, batch, at_once):
            pieces = before_piece(layer, streams[:, :, part], part.start, seed)
            mx.eval(pieces)
            found = found or [mx.zeros((*x.shape[:2], tokens, x.shape[3]), x.dtype) for x in pieces]
            for whole, piece in zip(found, pieces):
                whole[:, :, part] = piece
            del pieces, piece
            mx.eval(found)
        self.queries, *own = found
        self.kv: KeysValues = shared_kv or tuple(own)
        self.window, self.mask = layer.window, attention_mask
        self.out = mx.zeros_like(self.queries)
        for q, k in query_blocks(tokens, tokens, self.window):
            block = self._block(q, k)(self.queries[:, :, q], *(x[:, :, k] for x in self.kv))
            mx.eval(block)
            self.out[:, :, q] = block
            del block
            mx.eval(self.out)

    def _block(self, q: slice, k: slice) -> Callable[..., mx.array]:
        return lambda *qkv: attend_block(*qkv, q.start - k.start, self.window, self.mask[:, k])

    def backward(self, cotangent: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """The gradients of queries, keys and values, from that of `out`."""
        tokens = self.queries.shape[2]
        queries, keys, values = (mx.zeros_like(x) for x in (self.queries, *self.kv))
        for q, k in query_blocks(tokens, tokens, self.window):
            primals = [self.queries[:, :, q], *(x[:, :, k] for x in self.kv)]
            dq, dk, dv = attention_gradients(self._block(q, k), *primals, cotangent[:, :, q])
            dk, dv = keys[:, :, k] + dk, values[:, :, k] + dv
            mx.eval(dq, dk, dv)
            queries[:, :, q], keys[:, :, k], values[:, :, k] = dq, dk, dv
            del primals, dq, dk, dv
            mx.eval(queries, keys, values)
        return queries, keys, values


def layer_forward(
    layer: DecoderLayer, streams: mx.array, per_layer_input: mx.array, attended: Attended, seed: int, at_once: int
) -> mx.array:
    """The streams `[altup_inputs, batch, tokens, hidden]` after a layer, evaluated."""
    out = mx.zeros_like(streams)
    for part in parts(streams.shape[2], streams.shape[1], at_once):
        inputs = streams[:, :, part], attended.out[:, :, part], per_layer_input[:, part]
        piece = after_piece(layer, *inputs, part.start, seed)
        del inputs
        mx.eval(piece)
        out[:, :, part] = piece
        del piece
        mx.eval(out)
    return out


def layer_backward(
    layer: DecoderLayer,
    streams: mx.array,
    per_layer_input: mx.array,
    attended: Attended,
    cotangent: mx.array,
    kv_cotangent: Optional[KeysValues],
    seeds: Sequence[int],
    at_once: int,
    gradients: Gradients,
    path: str,
    per_layer_gradient: bool,
) -> tuple[mx.array, KeysValues, Optional[mx.array]]:
    """
    Args:
        cotangent: of the streams after the layer. Its memory becomes that of the result.
        kv_cotangent: what the layers that share this one's keys and values have found for those, or None.
        seeds: of `layer_seeds`.
        gradients: the layer's are added to it.
        per_layer_gradient: whether `per_layer_input` needs one.

    Returns:
        The gradients of the streams before the layer, of the keys and values it attended to, and of its per-layer
        input or None; evaluated.
    """
    _, batch, tokens, _ = streams.shape
    out_cotangent, ple_gradient = mx.zeros_like(attended.out), None
    if per_layer_gradient:
        ple_gradient = mx.zeros(per_layer_input.shape, per_layer_input.dtype)
    for part in parts(tokens, batch, at_once):
        inputs = streams[:, :, part], attended.out[:, :, part], per_layer_input[:, part]
        found, products = after_gradients(
            layer, *inputs, part.start, seeds[1], cotangent[:, :, part], per_layer_gradient
        )
        mx.eval(products, add(gradients, path, found))
        cotangent[:, :, part], out_cotangent[:, :, part] = products[:2]
        if ple_gradient is not None:
            ple_gradient[:, part] = products[2]
        del inputs, found, products
        mx.eval(cotangent, out_cotangent, ple_gradient)
    queries, *kv = attended.backward(out_cotangent)
    del out_cotangent
    if kv_cotangent is not None:
        kv = [mine + theirs for mine, theirs in zip(kv, kv_cotangent)]
        mx.eval(kv)
    own = [queries] if layer.self_attn.is_kv_shared else [queries, *kv]
    for part in parts(tokens, batch, at_once):
        slopes = [x[:, :, part] for x in own]
        found, (product,) = before_gradients(layer, streams[:, :, part], part.start, seeds[0], slopes)
        product = cotangent[:, :, part] + product
        mx.eval(product, add(gradients, path, found))
        cotangent[:, :, part] = product
        del slopes, found, product
        mx.eval(cotangent)
    return cotangent, tuple(kv), ple_gradient


def text_forward(
    model: Gemma3n,
    streams: mx.array,
    per_layer_inputs: mx.array,
    attention_mask: mx.array,
    at_once: int,
    seed: int,
    kept: Optional[Kept] = None,
) -> mx.array:
    """The decoder's layers, one after the other, evaluated.

    Args:
        streams: `[altup_inputs, batch, tokens, hidden]`, before the first layer.
        per_layer_inputs: `[batch, tokens, layers, hidden_size_per_layer_input]`.
        attention_mask: `[batch, tokens]`, 1 on real tokens.
        at_once: tokens that go through the parts around attention together.
        seed: of all dropout.
        kept: filled with what `text_backward` needs; None when there is none.

    Returns:
        The streams after the last layer.
    """
    config = model.config.text_config
    donors = {config.kv_donor(i) for i in range(config.num_hidden_layers) if config.is_kv_shared(i)}
    seeds = layer_seeds(seed, config.num_hidden_layers)
    kv: dict[int, KeysValues] = {}
    for i, layer in enumerate(model.layers):
        if kept is not None:
            kept.streams.append(streams)
        shared_kv = kv[config.kv_donor(i)] if config.is_kv_shared(i) else None
        attended = Attended(layer, streams, attention_mask, shared_kv, seeds[i][0], at_once)
        if i in donors:
            kv[i] = attended.kv
        streams = layer_forward(layer, streams, per_layer_inputs[:, :, i], attended, seeds[i][1], at_once)
    if kept is not None:
        kept.kv = kv
    return streams


def text_backward(
    model: Gemma3n,
    kept: Kept,
    per_layer_inputs: mx.array,
    attention_mask: mx.array,
    at_once: int,
    seed: int,
    cotangent: mx.array,
    gradients: Gradients,
    per_layer_gradient: bool,
) -> tuple[mx.array, Optional[mx.array]]:
    """Goes back through the layers; arguments as in `text_forward` and `layer_backward`.

    `kept.streams` is emptied on the way.

    Returns:
        The gradients of the streams before the first layer, and of `per_layer_inputs` or None; evaluated.
    """
    config = model.config.text_config
    kv_cotangents: dict[int, KeysValues] = {}
    ple_gradients: list[mx.array] = []
    seeds = layer_seeds(seed, config.num_hidden_layers)
    for i in reversed(range(config.num_hidden_layers)):
        layer, streams, donor = model.layers[i], kept.streams.pop(), config.kv_donor(i)
        shared_kv = kept.kv[donor] if donor != i else None
        attended = Attended(layer, streams, attention_mask, shared_kv, seeds[i][0], at_once)
        cotangent, kv, ple = layer_backward(
            layer,
            streams,
            per_layer_inputs[:, :, i],
            attended,
            cotangent,
            kv_cotangents.pop(i, None),
            seeds[i],
            at_once,
            gradients,
            f"language_model.layers.{i}",
            per_layer_gradient,
        )
        if donor != i:
            before = kv_cotangents.get(donor)
            kv_cotangents[donor] = kv if before is None else tuple(a + b for a, b in zip(before, kv))
            mx.eval(kv_cotangents[donor])
        if ple is not None:
            ple_gradients.append(ple)
        # Before the next layer's are there.
        del streams, shared_kv, attended, kv, ple
    return cotangent, mx.stack(ple_gradients[::-1], axis=2) if ple_gradients else None
