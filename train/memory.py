"""The memory of a training step, from config.json and the shapes of its batches, before anything is loaded.

A model is built of arrays that are never computed: their shapes give the bytes of weights, adapters and optimizer. What
a step holds on to follows from `train/passes.py`, line by line. What is in flight while a piece is computed comes from
that piece's own graph (`train/trace.py`). There is no constant in here that was fitted to a measurement.

A step's memory is that of its worst moment, so `moments` lists them all. Everything is counted in bytes.
"""

from dataclasses import dataclass
from typing import Any, Callable, Iterator

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from convert.checkpoint import is_quantized
from mlx_gemma3n.audio import time_stride
from mlx_gemma3n.config import Config
from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.text import attend_block, query_blocks
from train import piece
from train.loss import chunk_loss
from train.step import Pieces
from train.trace import Memory, trace

# Log-mel frames of the longest clip, 30 s of 10 ms.
FRAMES = 3000
# What a piece may be, and the share of what a step keeps that one piece in flight may add to it.
TOKENS, LOGITS, SHARE = (64, 512), (16, 128), 0.5


@dataclass(frozen=True)
class Case:
    """The shape of a micro-batch.

    Attributes:
        batch: its rows.
        tokens: the length that they are padded to.
        supervised: labels in it.
        clips: of audio in it.
        another: whether the gradients of another micro-batch are there already, for this one's to be added to.
    """

    batch: int
    tokens: int
    supervised: int
    clips: int = 0
    another: bool = False


@dataclass(frozen=True)
class Estimate:
    """The memory of a step, in bytes.

    Attributes:
        weights: of the base model, as far as they are resident.
        adapters: their weights and the gradients of those.
        optimizer: its state.
        data: embeddings, soft tokens and per-layer inputs of the batch.
        saved: what the forward pass keeps for the backward pass.
        layer: what a layer has in flight, at its worst, on top of all these.
        loss: what the loss has, likewise.
        peak: of the step.
        moment: when that is.
    """

    weights: int
    adapters: int
    optimizer: int
    data: int
    saved: int
    layer: int
    loss: int
    peak: int
    moment: str


def skeleton(config: Config, dtype: mx.Dtype) -> Gemma3n:
    """A model as loading makes it, none of whose arrays is ever computed: for their shapes."""
    model = Gemma3n(config)
    if quantization := config.quantization:
        defaults = {k: quantization[k] for k in ("group_size", "bits") if k in quantization}
        overrides = {k: v for k, v in quantization.items() if isinstance(v, dict)}

        def choose(path: str, module: nn.Module) -> Any:
            if not hasattr(module, "to_quantized") or not is_quantized(f"{path}.weight"):
                return False
            wanted = {**defaults, **overrides.get(path, {})}
            return wanted if module.weight.shape[-1] % wanted.get("group_size", 64) == 0 else False

        nn.quantize(model, class_predicate=choose)
    model.update(
        tree_unflatten(
            [(n, w.astype(dtype)) for n, w in tree_flatten(model.parameters()) if mx.issubdtype(w.dtype, mx.floating)]
        )
    )
    return model


def _bytes(arrays: Any) -> int:
    return sum(x.nbytes for _, x in tree_flatten(arrays))


def _signature(module: nn.Module) -> tuple:
    return tuple((n, x.shape, str(x.dtype)) for n, x in tree_flatten(module.parameters()))


class Planner:
    """Estimates for one model, one set of adapters and one optimizer; pieces that are alike are traced once.

    Args:
        model: of `skeleton`, with its adapters.
        moments: arrays that the optimizer keeps for each weight, 2 for AdamW.
        cached: the clips' soft tokens come from the cache, and the audio tower is not there.
    """

    def __init__(self, model: Gemma3n, moments: int, cached: bool = True):
        self.model, self.cached = model.train(), cached
        self.text = model.config.text_config
        self.dtype = model.language_model.norm.weight.dtype
        self.size = self.dtype.size
        trained = dict(tree_flatten(model.trainable_parameters()))
        self.adapters = _bytes(trained)
        self.optimizer = moments * self.adapters
        self.largest = max(x.nbytes for x in trained.values())
        elsewhere = ("language_model.embed_tokens_per_layer.", *(("audio_tower.",) if cached else ()))
        resident = [x for n, x in tree_flatten(model.parameters()) if not n.startswith(elsewhere) and n not in trained]
        self.weights = _bytes(resident)
        further = [n for n in trained if not n.startswith(("language_model.layers.", "audio_tower."))]
        self.further = bool(further and piece.start_parameters(model)) or any(
            n.startswith(("embed_", "audio_tower.")) for n in trained
        )
        self._traces: dict[Any, Memory] = {}

    # Pieces, traced on shapes.

    def _zeros(self, *shape: int) -> mx.array:
        return mx.zeros(shape, self.dtype)

    def _trace(self, key: Any, module: nn.Module, function: Callable[..., Any], *inputs: mx.array, first: int = 0):
        """The memory of a piece of `module`, whose parameters count as given."""
        key = (key, tuple((x.shape, str(x.dtype)) for x in inputs))
        if key not in self._traces:
            names, values = zip(*tree_flatten(module.parameters()))

            def run(*arrays: mx.array) -> Any:
                module.update(tree_unflatten(list(zip(names, arrays))))
                return function(*arrays[len(names) :])

            with piece.own_randomness():
                self._traces[key] = trace(run, *values, *inputs, first=first)
            module.update(tree_unflatten(list(zip(names, values))))
        return self._traces[key]

    def _width(self, case: Case, pieces: Pieces) -> int:
        return min(case.tokens, max(1, pieces.tokens // case.batch))

    def _kind(self, i: int) -> tuple:
        layer = self.model.layers[i]
        return (_signature(layer), layer.window, layer.mlp.sparsity > 0)

    def _streams(self, batch: int, tokens: int) -> mx.array:
        return self._zeros(self.text.altup_num_inputs, batch, tokens, self.text.hidden_size)

    def _heads(self, batch: int, tokens: int, keys: bool = False) -> mx.array:
        heads = self.text.num_key_value_heads if keys else self.text.num_attention_heads
        return self._zeros(batch, heads, tokens, self.text.head_dim)

    def before(self, i: int, batch: int, width: int) -> int:
        layer, streams = self.model.layers[i], self._streams(batch, width)
        run = lambda x: piece.before_piece(layer, x, 0, 0)
        return self._trace(("before", self._kind(i)), layer, run, streams).peak

    def after(self, i: int, batch: int, width: int) -> int:
        layer = self.model.layers[i]
        ple = self._zeros(batch, width, self.text.hidden_size_per_layer_input)
        run = lambda x, out, ple: [piece.after_piece(layer, x, out, ple, 0, 0)]
        inputs = self._streams(batch, width), self._heads(batch, width), ple
        return self._trace(("after", self._kind(i)), layer, run, *inputs).peak

    def before_backward(self, i: int, batch: int, width: int) -> int:
        layer, streams = self.model.layers[i], self._streams(batch, width)
        queries, keys = self._heads(batch, width), self._heads(batch, width, keys=True)
        slopes = [queries] if layer.self_attn.is_kv_shared else [queries, keys, keys]

        def run(x: mx.array, cotangent: mx.array, *slopes: mx.array) -> list[mx.array]:
            found, (product,) = piece.before_gradients(layer, x, 0, 0, slopes)
            return [cotangent + product, *found.values()]

        return self._trace(("before_b", self._kind(i)), layer, run, streams, streams, *slopes).peak

    def after_backward(self, i: int, batch: int, width: int) -> int:
        layer = self.model.layers[i]
        ple = self._zeros(batch, width, self.text.hidden_size_per_layer_input)

        def run(x: mx.array, out: mx.array, ple: mx.array, slope: mx.array) -> list[mx.array]:
            found, products = piece.after_gradients(layer, x, out, ple, 0, 0, slope, self.further)
            return [*products, *found.values()]

        streams = self._streams(batch, width)
        inputs = streams, self._heads(batch, width), ple, streams
        return self._trace(("after_b", self._kind(i)), layer, run, *inputs).peak

    def attention(self, i: int, case: Case, backward: bool) -> int:
        """Of the largest block."""
        window = self.model.layers[i].window
        q, k = max(
            query_blocks(case.tokens, case.tokens, window),
            key=lambda block: (block[0].stop - block[0].start) * (block[1].stop - block[1].start),
        )
        queries = self._heads(case.batch, q.stop - q.start)
        keys = self._heads(case.batch, k.stop - k.start, keys=True)
        mask = mx.zeros((case.batch, k.stop - k.start), mx.int32)
        gap = q.start - k.start

        def run(mask: mx.array, *qkv: mx.array) -> list[mx.array]:
            block = lambda *qkv: attend_block(*qkv, gap, window, mask)
            return piece.attention_gradients(block, *qkv[1:], qkv[0]) if backward else [block(*qkv[1:])]

        key = ("attention", backward, gap, window)
        return self._trace(key, self.model.language_model.norm, run, mask, queries, queries, keys, keys).peak

    def start(self, case: Case, width: int) -> int:
        text, ids = self.model.language_model, mx.zeros((case.batch, width), mx.int32)
        embeds = self._zeros(case.batch, width, self.text.hidden_size)
        streams = self._trace("streams", text, lambda x: [text.streams(x)], embeds).peak
        inputs = self._trace("inputs", text, lambda x: [text.per_layer_inputs(ids, x)], embeds).peak
        return max(streams, inputs)

    def start_backward(self, case: Case, width: int) -> int:
        text, config = self.model.language_model, self.text
        ids = mx.zeros((case.batch, width), mx.int32)
        ple = self._zeros(case.batch, width, config.num_hidden_layers, config.hidden_size_per_layer_input)
        embeds = self._zeros(case.batch, width, config.hidden_size)

        def run(x: mx.array, streams: mx.array, ple: mx.array) -> list[mx.array]:
            found, products = piece.start_gradients(self.model, ids, x, streams, ple)
            return [*products, *found.values()]

        return self._trace("start_b", text, run, embeds, self._streams(case.batch, width), ple).peak

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

    def logits(self, rows: int) -> int:
        text, hidden = self.model.language_model, self._zeros(rows, self.text.hidden_size)
        targets = mx.zeros((rows,), mx.int32)
        run = lambda hidden, targets: list(chunk_loss(self.model, hidden, targets))
        return self._trace("loss", text, run, hidden, targets).peak

    # What a step holds.

    def _sizes(self, case: Case) -> tuple[int, int, int]:
        """Of the streams, of queries or attention, and of one layer's keys and values, over the whole batch."""
        tokens, config = case.batch * case.tokens * self.size, self.text
        head = config.head_dim * tokens
        streams = config.altup_num_inputs * config.hidden_size * tokens
        return streams, config.num_attention_heads * head, 2 * config.num_key_value_heads * head

    def data(self, case: Case) -> int:
        """Per-layer inputs, and embeddings and soft tokens where they are kept."""
        config, tokens = self.text, case.batch * case.tokens * self.size
        size = config.num_hidden_layers * config.hidden_size_per_layer_input * tokens
        return size + (self._embeds(case) if self.further else 0)

    def _embeds(self, case: Case) -> int:
        soft = case.clips * self.model.config.audio_soft_tokens_per_image
        return (case.batch * case.tokens + soft) * self.text.hidden_size * self.size

    def _donors(self) -> set[int]:
        layers = range(self.text.num_hidden_layers)
        return {self.text.kv_donor(i) for i in layers if self.text.is_kv_shared(i)}

    def moments(self, case: Case, pieces: Pieces) -> Iterator[tuple[str, str, int]]:
        """Every moment of a step under gradient checkpointing that may be its worst: what it is, `layer`, `loss` or
        `update`, and its bytes on top of weights, adapters and optimizer."""
        streams, queries, kv = self._sizes(case)
        config, width = self.text, self._width(case, pieces)
        batch, data, donors = case.batch, self.data(case), self._donors()
        layers = range(config.num_hidden_layers)
        dropped = 0 if self.further else self._embeds(case)
        yield "before the first layer", "layer", data + dropped + streams + self.start(case, width)

        shared = 0
        for i in layers:
            saved = data + (i + 1) * streams + shared
            own = 0 if config.is_kv_shared(i) else kv
            yield f"layer {i}, forward", "layer", saved + queries + own + self.before(i, batch, width)
            yield f"attention of layer {i}", "layer", saved + 2 * queries + own + self.attention(i, case, False)
            after = 2 * queries + own + streams + self.after(i, batch, width)
            yield f"layer {i}, forward", "layer", saved + after
            shared += kv if i in donors else 0

        saved = data + len(layers) * streams + shared
        row = config.hidden_size * self.size * case.supervised
        rows, width_end = config.altup_num_inputs * row, min(pieces.tokens, case.supervised)
        yield "the supervised rows", "loss", saved + streams + rows
        yield "the final norm", "loss", saved + rows + row + self.end(width_end, False)
        chunk = self.logits(min(pieces.logits, case.supervised))
        yield "the loss", "loss", saved + rows + 2 * row + chunk
        yield "the final norm, backward", "loss", saved + rows + row + self.end(width_end, True)
        yield "the loss's gradient", "loss", saved + rows + row + streams

        gradients, waiting = 0, 0
        ple = 0
        for i in reversed(layers):
            saved = data + (i + 1) * streams + shared + streams + waiting + ple + gradients
            own = 0 if config.is_kv_shared(i) else kv
            # Where gradients are there already, this is the new ones of a layer before they are added to those.
            mine = _bytes(self.model.layers[i].trainable_parameters())
            gradients = mine if case.another else gradients + mine
            held = 2 * queries + own
            yield f"layer {i}, again", "layer", saved + queries + own + self.before(i, batch, width)
            yield f"attention of layer {i}, again", "layer", saved + held + self.attention(i, case, False)
            after = self.after_backward(i, batch, width)
            yield f"layer {i}, backward", "layer", saved + held + queries + after
            attention = self.attention(i, case, True)
            yield f"attention of layer {i}, backward", "layer", saved + held + 2 * queries + kv + attention
            before = self.before_backward(i, batch, width)
            yield f"layer {i}, backward", "layer", saved + held + queries + kv + mine + before
            if config.is_kv_shared(i):
                # One sum for each layer that others take keys and values from.
                waiting = kv * len({config.kv_donor(j) for j in layers[i:] if config.is_kv_shared(j)})
            if self.further:
                ple += batch * case.tokens * config.hidden_size_per_layer_input * self.size
        if self.further:
            held = data + streams + 2 * ple + gradients + self._embeds(case) // 2
            yield "before the first layer, backward", "layer", held + self.start_backward(case, width)
        yield "the update", "update", 2 * self.adapters + 8 * self.largest

    def kept_moments(self, case: Case, pieces: Pieces) -> Iterator[tuple[str, str, int]]:
        """The same where nothing is computed twice: all that the layers' gradients are computed from is kept."""
        streams, _, kv = self._sizes(case)
        data, config, row = self.data(case), self.text, self.text.hidden_size * self.size * case.supervised
        start = streams + self.start(case, case.tokens)
        yield "before the first layer", "layer", data + self._embeds(case) + start
        saved = data + (start if self.further else streams)
        layers = [self.kept(i, case) for i in range(config.num_hidden_layers)]
        total = saved + sum(layer.kept for layer in layers)
        end = self.end_kept(case.batch * case.tokens)
        chunk = self.logits(min(pieces.logits, case.supervised))
        yield "the loss", "loss", total + end.kept + 3 * row + chunk
        yield "the final norm, backward", "loss", total + end.peak + row
        for i in reversed(range(config.num_hidden_layers)):
            below = saved + sum(layer.kept for layer in layers[:i]) + streams + kv
            yield f"layer {i}, backward", "layer", below + layers[i].peak + self.adapters
        yield "the update", "update", 2 * self.adapters + 8 * self.largest

    def end_kept(self, width: int) -> Memory:
        """What merging the streams keeps for its backward pass, and its peak with that."""
        text, config = self.model.language_model, self.text

        def run(rows: mx.array, slope: mx.array) -> list[mx.array]:
            outputs, products = mx.vjp(lambda rows: [text.merge(rows)], [rows], [slope])
            return [*outputs, *products]

        rows = self._zeros(config.altup_num_inputs, width, config.hidden_size)
        return self._trace("end_kept", text, run, rows, self._zeros(width, config.hidden_size), first=1)

    def kept(self, i: int, case: Case) -> Memory:
        """What one layer keeps of its forward pass, and its peak with the backward pass."""
        layer, config = self.model.layers[i], self.text
        parameters = piece.trainable(layer)
        ple = self._zeros(case.batch, case.tokens, config.hidden_size_per_layer_input)
        mask = mx.zeros((case.batch, case.tokens), mx.int32)
        streams, keys = self._streams(case.batch, case.tokens), self._heads(case.batch, case.tokens, keys=True)
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
        return self._trace(("kept", self._kind(i), bool(shared)), layer, run, *inputs, first=first)

    def audio_moments(self, case: Case) -> Iterator[tuple[str, str, int]]:
        """Of a tower with adapters, one clip at a time."""
        tower, config = self.model.audio_tower, self.model.config.audio_config
        soft = self._embeds(case) * 2
        features = self._zeros(1, FRAMES, config.input_feat_size)
        frames = -(-FRAMES // time_stride(config))
        padding = mx.zeros((1, frames), mx.bool_)
        x = self._zeros(1, frames, config.hidden_size)
        stem = tower.subsample_conv_projection
        yield "the audio tower", "layer", soft + self._trace("stem", stem, lambda f: [stem(f)], features).peak
        kept = (len(tower.conformer) + 1) * x.nbytes
        gradients = 0
        for i, block in enumerate(tower.conformer):
            kind = (_signature(block),)
            forward = self._trace(("block", kind), block, lambda x, block=block: [block(x, padding)], x).peak
            yield f"conformer {i}", "layer", soft + (i + 1) * x.nbytes + forward

            def run(x: mx.array, slope: mx.array, block: nn.Module = block) -> list[mx.array]:
                found, products = piece.vjp(block, piece.trainable(block), lambda x: [block(x, padding)], [x], [slope])
                return [*products, *found.values()]

            backward = self._trace(("block_b", kind), block, run, x, x).peak
            gradients += 2 * _bytes(block.trainable_parameters())
            yield f"conformer {i}, backward", "layer", soft + self.adapters + kept + x.nbytes + backward

    def estimate(self, case: Case, pieces: Pieces) -> Estimate:
        """The memory of a step of one micro-batch; further ones add nothing."""
        all_moments = list(self.moments(case, pieces) if pieces.checkpointing else self.kept_moments(case, pieces))
        if not self.cached and case.clips:
            all_moments += self.audio_moments(case)
        resident = self.weights + self.adapters + self.optimizer
        if case.another:
            # But for the update, which has its own count of them.
            all_moments = [(n, kind, size + (kind != "update") * self.adapters) for n, kind, size in all_moments]
        moment, _, most = max(all_moments, key=lambda m: m[2])
        data = self.data(case)
        streams, _, kv = self._sizes(case)
        if pieces.checkpointing:
            saved = self.text.num_hidden_layers * streams + kv * len(self._donors())
        else:
            saved = sum(self.kept(i, case).kept for i in range(self.text.num_hidden_layers))
        worst = {kind: max((m[2] for m in all_moments if m[1] == kind), default=0) for kind in ("layer", "loss")}
        return Estimate(
            weights=self.weights,
            adapters=2 * self.adapters,
            optimizer=self.optimizer,
            data=data,
            saved=saved,
            layer=max(0, worst["layer"] - data - saved),
            loss=max(0, worst["loss"] - data - saved),
            peak=resident + most,
            moment=moment,
        )

    def evaluation(self, tokens: int, batch: int, supervised: int, pieces: Pieces) -> int:
        """The peak of evaluating a batch: a forward pass that keeps nothing but shared keys and values."""
        case = Case(batch, tokens, batch * supervised, 0)
        streams, queries, kv = self._sizes(case)
        width, config = self._width(case, pieces), self.text
        held = self.data(case) + 2 * streams + 2 * queries + kv * (1 + len(self._donors()))
        layers = range(config.num_hidden_layers)
        flight = max(self.after(i, batch, width) for i in layers)
        flight = max(flight, *(self.attention(i, case, False) for i in layers), self.logits(pieces.logits))
        rows = (config.altup_num_inputs + 1) * config.hidden_size * self.size * case.supervised
        return self.weights + self.adapters + self.optimizer + held + rows + flight

    def pieces(self, case: Case) -> Pieces:
        """Pieces that have half as much in flight as the step keeps anyway, within `TOKENS` and `LOGITS`: larger ones
        would be faster by little."""
        streams, *_ = self._sizes(case)
        room = SHARE * self.text.num_hidden_layers * streams
        least = TOKENS[0]
        token = self.after_backward(0, 1, least) / least
        row = self.logits(LOGITS[0]) / LOGITS[0]
        return Pieces(True, _power(room / token, TOKENS), _power(room / row, LOGITS))


def _power(x: float, bounds: tuple[int, int]) -> int:
    """The largest power of two up to `x`, within bounds that are powers of two."""
    least, most = bounds
    while least < most and 2 * least <= x:
        least *= 2
    return least
