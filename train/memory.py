"""The memory of a training step, from config.json and the shapes of its batches, before anything is loaded.

A model is built of arrays that are never computed: their shapes give the bytes of weights, adapters and optimizer. What
a step holds on to follows from `train/passes.py`, line by line. What is in flight while a piece is computed comes from
that piece's own graph (`train/flight.py`). There is no constant in here that was fitted to a measurement.

A step's memory is that of its worst moment, so `moments` lists them all. Everything is counted in bytes.
"""

from dataclasses import dataclass
from typing import Any, Iterator

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from convert.checkpoint import is_quantized
from mlx_gemma3n.config import Config
from mlx_gemma3n.loading import quantize
from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.names import expected_shapes
from train.flight import Flight
from train.piece import start_parameters
from train.step import Pieces

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
    if config.quantization:
        shapes = expected_shapes(config)

        def chosen(path: str, group_size: int) -> bool:
            # As conversion chooses, where rows are made of whole groups.
            weight = f"{path}.weight"
            return is_quantized(weight) and shapes[weight][-1] % group_size == 0

        quantize(model, config.quantization, chosen)
    model.update(
        tree_unflatten(
            [(n, w.astype(dtype)) for n, w in tree_flatten(model.parameters()) if mx.issubdtype(w.dtype, mx.floating)]
        )
    )
    return model


def _bytes(arrays: Any) -> int:
    return sum(x.nbytes for _, x in tree_flatten(arrays))


class Planner:
    """Estimates for one model, one set of adapters and one optimizer.

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
        self.by_layer = [_bytes(layer.trainable_parameters()) for layer in model.layers]
        elsewhere = ("language_model.embed_tokens_per_layer.", *(("audio_tower.",) if cached else ()))
        resident = [x for n, x in tree_flatten(model.parameters()) if not n.startswith(elsewhere) and n not in trained]
        self.weights = _bytes(resident)
        # Whether the backward pass goes on before the first layer.
        self.further = bool(start_parameters(model)) or any(n.startswith(("embed_", "audio_tower.")) for n in trained)
        self.flight = Flight(model, self.further)

    def _width(self, case: Case, pieces: Pieces) -> int:
        return min(case.tokens, max(1, pieces.tokens // case.batch))

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
        yield "before the first layer", "layer", data + dropped + streams + self.flight.start(batch, width)

        shared = 0
        for i in layers:
            saved = data + (i + 1) * streams + shared
            own = 0 if config.is_kv_shared(i) else kv
            yield f"layer {i}, forward", "layer", saved + queries + own + self.flight.before(i, batch, width)
            yield (
                f"attention of layer {i}",
                "layer",
                saved + 2 * queries + own + self.flight.attention(i, batch, case.tokens, False),
            )
            after = 2 * queries + own + streams + self.flight.after(i, batch, width)
            yield f"layer {i}, forward", "layer", saved + after
            shared += kv if i in donors else 0

        saved = data + len(layers) * streams + shared
        row = config.hidden_size * self.size * case.supervised
        rows, width_end = config.altup_num_inputs * row, min(pieces.tokens, case.supervised)
        yield "the supervised rows", "loss", saved + streams + rows
        yield "the final norm", "loss", saved + rows + row + self.flight.end(width_end, False)
        chunk = self.flight.logits(min(pieces.logits, case.supervised))
        yield "the loss", "loss", saved + rows + 2 * row + chunk
        yield "the final norm, backward", "loss", saved + rows + row + self.flight.end(width_end, True)
        yield "the loss's gradient", "loss", saved + rows + row + streams

        gradients = waiting = ple = 0
        for i in reversed(layers):
            saved = data + (i + 1) * streams + shared + streams + waiting + ple + gradients
            own = 0 if config.is_kv_shared(i) else kv
            # Where gradients are there already, this is the new ones of a layer before they are added to those.
            mine = self.by_layer[i]
            gradients = mine if case.another else gradients + mine
            held = 2 * queries + own
            yield f"layer {i}, again", "layer", saved + queries + own + self.flight.before(i, batch, width)
            yield (
                f"attention of layer {i}, again",
                "layer",
                saved + held + self.flight.attention(i, batch, case.tokens, False),
            )
            after = self.flight.after_backward(i, batch, width)
            yield f"layer {i}, backward", "layer", saved + held + queries + after
            attention = self.flight.attention(i, batch, case.tokens, True)
            yield f"attention of layer {i}, backward", "layer", saved + held + 2 * queries + kv + attention
            before = self.flight.before_backward(i, batch, width)
            yield f"layer {i}, backward", "layer", saved + held + queries + kv + mine + before
            if config.is_kv_shared(i):
                # One sum for each layer that others take keys and values from.
                waiting = kv * len({config.kv_donor(j) for j in layers[i:] if config.is_kv_shared(j)})
            if self.further:
                ple += batch * case.tokens * config.hidden_size_per_layer_input * self.size
        if self.further:
            held = data + streams + 2 * ple + gradients + self._embeds(case) // 2
            yield "before the first layer, backward", "layer", held + self.flight.start_backward(batch, width)
        yield "the update", "update", 2 * self.adapters + 8 * self.largest

    def kept_moments(self, case: Case, pieces: Pieces) -> Iterator[tuple[str, str, int]]:
        """The same where nothing is computed twice: all that the layers' gradients are computed from is kept."""
        streams, _, kv = self._sizes(case)
        data, config, row = self.data(case), self.text, self.text.hidden_size * self.size * case.supervised
        start = streams + self.flight.start(case.batch, case.tokens)
        yield "before the first layer", "layer", data + self._embeds(case) + start
        saved = data + (start if self.further else streams)
        layers = [self.flight.kept(i, case.batch, case.tokens) for i in range(config.num_hidden_layers)]
        total = saved + sum(layer.kept for layer in layers)
        end = self.flight.end_kept(case.batch * case.tokens)
        chunk = self.flight.logits(min(pieces.logits, case.supervised))
        yield "the loss", "loss", total + end.kept + 3 * row + chunk
        yield "the final norm, backward", "loss", total + end.peak + row
        for i in reversed(range(config.num_hidden_layers)):
            below = saved + sum(layer.kept for layer in layers[:i]) + streams + kv
            yield f"layer {i}, backward", "layer", below + layers[i].peak + self.adapters
        yield "the update", "update", 2 * self.adapters + 8 * self.largest

    def audio_moments(self, case: Case) -> Iterator[tuple[str, str, int]]:
        """Of a tower with adapters, one clip at a time."""
        soft = self._embeds(case) * 2
        features = self.flight.features().nbytes
        yield "the audio tower", "layer", soft + self.adapters + features + self.flight.stem()
        blocks, size = range(len(self.model.audio_tower.conformer)), self.flight.frames().nbytes
        for i in blocks:
            yield f"conformer {i}", "layer", soft + (i + 1) * size + self.flight.block(i, False)
        kept = (len(blocks) + 2) * size
        for i in blocks:
            yield f"conformer {i}, backward", "layer", soft + self.adapters + kept + self.flight.block(i, True)

    def estimate(self, case: Case, pieces: Pieces) -> Estimate:
        """The memory of a step of micro-batches like `case`."""
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
            saved = sum(self.flight.kept(i, case.batch, case.tokens).kept for i in range(self.text.num_hidden_layers))
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
        flight = max(self.flight.after(i, batch, width) for i in layers)
        flight = max(
            flight,
            *(self.flight.attention(i, batch, case.tokens, False) for i in layers),
            self.flight.logits(pieces.logits),
        )
        rows = (config.altup_num_inputs + 1) * config.hidden_size * self.size * case.supervised
        return self.weights + self.adapters + self.optimizer + held + rows + flight

    def pieces(self, case: Case) -> Pieces:
        """Pieces that have half as much in flight as the step keeps anyway, within `TOKENS` and `LOGITS`: larger ones
        would be faster by little."""
        streams, *_ = self._sizes(case)
        room = SHARE * self.text.num_hidden_layers * streams
        least = TOKENS[0]
        token = self.flight.after_backward(0, 1, least) / least
        row = self.flight.logits(LOGITS[0]) / LOGITS[0]
        return Pieces(True, _power(room / token, TOKENS), _power(room / row, LOGITS))


def _power(x: float, bounds: tuple[int, int]) -> int:
    """The largest power of two up to `x`, within bounds that are powers of two."""
    least, most = bounds
    while least < most and 2 * least <= x:
        least *= 2
    return least
