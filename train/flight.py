"""What the pieces of a step have in flight while they are computed, in bytes, from their shapes alone.

Each method traces (`train/trace.py`) the function of `train/piece.py` that the step runs; pieces that are alike are
traced once.
"""

from typing import Any, Callable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_gemma3n.audio import time_stride
from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.text import attend_block, query_blocks
from train import piece
from train.loss import chunk_loss
from train.trace import Memory, trace


class Flight:
    """
    Args:
        model: of `train.memory.skeleton`, with its adapters, in training mode.
        further: whether the backward pass goes on before the first layer.
    """

    def __init__(self, model: Gemma3n, further: bool):
        self.model, self.text, self.further = model, model.config.text_config, further
        self.dtype = model.language_model.norm.weight.dtype
        # Layers of one kind have the same pieces.
        self._kinds = [(signature(x), x.window, x.mlp.sparsity > 0) for x in model.layers]
        self._traces: dict[Any, Memory] = {}

    def _zeros(self, *shape: int) -> mx.array:
        return mx.zeros(shape, self.dtype)

    def _trace(
        self, key: Any, module: nn.Module, function: Callable[..., Any], *inputs: mx.array, first: int = 0
    ) -> Memory:
        """The memory of a piece of `module`, whose parameters count as given."""
        key = (key, tuple((x.shape, str(x.dtype)) for x in inputs))
        if key not in self._traces:
            names, values = zip(*tree_flatten(module.parameters()))

            def run(*arrays: mx.array) -> Any:
                module.update(tree_unflatten(list(zip(names, arrays))))
                return function(*arrays[len(names) :])

            try:
                with piece.own_randomness():
                    self._traces[key] = trace(run, *values, *inputs, first=first)
            finally:
                module.update(tree_unflatten(list(zip(names, values))))
        return self._traces[key]

    def _streams(self, batch: int, tokens: int) -> mx.array:
        return self._zeros(self.text.altup_num_inputs, batch, tokens, self.text.hidden_size)

    def _heads(self, batch: int, tokens: int, keys: bool = False) -> mx.array:
        heads = self.text.num_key_value_heads if keys else self.text.num_attention_heads
        return self._zeros(batch, heads, tokens, self.text.head_dim)

    def before(self, i: int, batch: int, width: int) -> int:
        layer, streams = self.model.layers[i], self._streams(batch, width)
        run = lambda x: piece.before_piece(layer, x, 0, 0)
        return self._trace(("before", self._kinds[i]), layer, run, streams).peak

    def after(self, i: int, batch: int, width: int) -> int:
        layer = self.model.layers[i]
        ple = self._zeros(batch, width, self.text.hidden_size_per_layer_input)
        run = lambda x, out, ple: [piece.after_piece(layer, x, out, ple, 0, 0)]
        inputs = self._streams(batch, width), self._heads(batch, width), ple
        return self._trace(("after", self._kinds[i]), layer, run, *inputs).peak

    def before_backward(self, i: int, batch: int, width: int) -> int:
        layer, streams = self.model.layers[i], self._streams(batch, width)
        queries, keys = self._heads(batch, width), self._heads(batch, width, keys=True)
        slopes = [queries] if layer.self_attn.is_kv_shared else [queries, keys, keys]

        def run(x: mx.array, cotangent: mx.array, *slopes: mx.array) -> list[mx.array]:
            found, (product,) = piece.before_gradients(layer, x, 0, 0, slopes)
            return [cotangent + product, *found.values()]

        return self._trace(("before_b", self._kinds[i]), layer, run, streams, streams, *slopes).peak

    def after_backward(self, i: int, batch: int, width: int) -> int:
        layer = self.model.layers[i]
        ple = self._zeros(batch, width, self.text.hidden_size_per_layer_input)

        def run(x: mx.array, out: mx.array, ple: mx.array, slope: mx.array) -> list[mx.array]:
            found, products = piece.after_gradients(layer, x, out, ple, 0, 0, slope, self.further)
            return [*products, *found.values()]

        streams = self._streams(batch, width)
        inputs = streams, self._heads(batch, width), ple, streams
        return self._trace(("after_b", self._kinds[i]), layer, run, *inputs).peak

    def attention(self, i: int, batch: int, tokens: int, backward: bool) -> int:
        """Of the largest block."""
        window = self.model.layers[i].window
        q, k = max(
            query_blocks(tokens, tokens, window),
            key=lambda block: (block[0].stop - block[0].start) * (block[1].stop - block[1].start),
        )
        queries = self._heads(batch, q.stop - q.start)
        keys = self._heads(batch, k.stop - k.start, keys=True)
        mask = mx.zeros((batch, k.stop - k.start), mx.int32)
        gap = q.start - k.start

        def run(mask: mx.array, *qkv: mx.array) -> list[mx.array]:
            block = lambda *qkv: attend_block(*qkv, gap, window, mask)
            return piece.attention_gradients(block, *qkv[1:], qkv[0]) if backward else [block(*qkv[1:])]

        key = ("attention", backward, gap, window)
        return self._trace(key, self.model.language_model.norm, run, mask, queries, queries, keys, keys).peak

    def start(self, batch: int, width: int) -> int:
        text, ids = self.model.language_model, mx.zeros((batch, width), mx.int32)
        embeds = self._zeros(batch, width, self.text.hidden_size)
        streams = self._trace("streams", text, lambda x: [text.streams(x)], embeds).peak
        inputs = self._trace("inputs", text, lambda x: [text.per_layer_inputs(ids, x)], embeds).peak
        return max(streams, inputs)

    def start_backward(self, batch: int, width: int) -> int:
        text, config = self.model.language_model, self.text
        ids = mx.zeros((batch, width), mx.int32)
        ple = self._zeros(batch, width, config.num_hidden_layers, config.hidden_size_per_layer_input)
        embeds = self._zeros(batch, width, config.hidden_size)

        def run(x: mx.array, streams: mx.array, ple: mx.array) -> list[mx.array]:
            found, products = piece.start_gradients(self.model, ids, x, streams, ple)
            return [*products, *found.values()]

        return self._trace("start_b", text, run, embeds, self._streams(batch, width), ple).peak

    def end(self, width: int, backward: bool) -> int:
        text = self.model.language_model
        slope = self._zeros(width, self.text.hidden_size)
        rows = self._zeros(self.text.altup_num_inputs, width, self.text.hidden_size)
        if not backward:
            return self._trace("end", text, lambda rows: [text.merge(rows)], rows).peak

        def run(rows: mx.array, slope: mx.array) -> list[mx.array]:
            found, products = piece.end_gradients(self.model, rows, slope)
            return [*products, *found.values()]

        return self._trace("end_b", text, run, rows, slope).peak

    def end_kept(self, width: int) -> Memory:
        """What merging the streams keeps for its backward pass, and its peak with that."""
        text, config = self.model.language_model, self.text

        def run(rows: mx.array, slope: mx.array) -> list[mx.array]:
            outputs, products = mx.vjp(lambda rows: [text.merge(rows)], [rows], [slope])
            return [*outputs, *products]

        rows = self._zeros(config.altup_num_inputs, width, config.hidden_size)
        return self._trace("end_kept", text, run, rows, self._zeros(width, config.hidden_size), first=1)

    def logits(self, rows: int) -> int:
        text, hidden = self.model.language_model, self._zeros(rows, self.text.hidden_size)
        targets = mx.zeros((rows,), mx.int32)
        run = lambda hidden, targets: list(chunk_loss(self.model, hidden, targets))
        return self._trace("loss", text, run, hidden, targets).peak

    def kept(self, i: int, batch: int, tokens: int) -> Memory:
        """What one layer keeps of its forward pass, and its peak with the backward pass."""
        layer, config = self.model.layers[i], self.text
        parameters = piece.trainable(layer)
        ple = self._zeros(batch, tokens, config.hidden_size_per_layer_input)
        mask = mx.zeros((batch, tokens), mx.int32)
        streams, keys = self._streams(batch, tokens), self._heads(batch, tokens, keys=True)
        shared = [keys, keys] if config.is_kv_shared(i) else []
        count = len(parameters)

        def run(mask: mx.array, slope: mx.array, ple: mx.array, *inputs: mx.array) -> list[mx.array]:
            values = [value for value in piece.trainable(layer).values()]

            def forward(*arrays: mx.array) -> list[mx.array]:
                layer.update(tree_unflatten(list(zip(parameters, arrays[:count]))))
                kv = tuple(arrays[count + 1 :]) or None
                out, kv = layer(arrays[count], ple, mask, shared_kv=kv)
                return [out] if shared else [out, *kv]

            slopes = [slope] if shared else [slope, keys, keys]
            outputs, products = mx.vjp(forward, [*values, *inputs], slopes)
            return [*outputs, *products]

        first = 1 if shared else 3
        inputs = mask, streams, ple, streams, *shared
        return self._trace(("kept", self._kinds[i], bool(shared)), layer, run, *inputs, first=first)

    # The audio tower, one clip of the longest.

    def features(self) -> mx.array:
        """Log-mel of a clip that fills its placeholders, `[1, frames, mel_bins]`."""
        config = self.model.config.audio_config
        every = time_stride(config) * config.conf_reduction_factor
        return self._zeros(1, self.model.config.audio_soft_tokens_per_image * every, config.input_feat_size)

    def frames(self) -> mx.array:
        """What a block of the conformer takes and gives, `[1, frames / 4, hidden]`."""
        config = self.model.config.audio_config
        return self._zeros(1, -(-self.features().shape[1] // time_stride(config)), config.hidden_size)

    def stem(self) -> int:
        """Of the subsampling, with its backward pass where it has adapters."""
        module = self.model.audio_tower.subsample_conv_projection

        def run(features: mx.array, slope: mx.array) -> list[mx.array]:
            if not piece.trainable(module):
                return [module(features)]
            return list(piece.vjp(module, piece.trainable(module), lambda: [module(features)], [], [slope])[0].values())

        return self._trace("stem", module, run, self.features(), self.frames()).peak

    def block(self, i: int, backward: bool) -> int:
        """Of a conformer block."""
        module, x = self.model.audio_tower.conformer[i], self.frames()
        padding = mx.zeros(x.shape[:2], mx.bool_)

        def run(x: mx.array, slope: mx.array) -> list[mx.array]:
            if not backward:
                return [module(x, padding)]
            found, products = piece.vjp(module, piece.trainable(module), lambda x: [module(x, padding)], [x], [slope])
            return [*products, *found.values()]

        return self._trace(("block", backward, signature(module)), module, run, x, x).peak


def signature(module: nn.Module) -> tuple:
    """What the memory of a module's pieces depends on."""
    return tuple((n, x.shape, str(x.dtype)) for n, x in tree_flatten(module.parameters()))
