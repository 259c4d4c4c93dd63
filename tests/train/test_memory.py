"""The planned memory of a step: against a real one, as its shape grows, and for Google's two checkpoints."""

import gc
from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_gemma3n import lora
from mlx_gemma3n.config import Config
from tests.benchmarks import plan_memory
from train.memory import LOGITS, TOKENS, Case, Estimate, Planner, skeleton
from train.plan import known_config
from train.step import Pieces

GB = 1e9
# Small enough for a few seconds. As in the benchmark, whose ids go up to 10 000: hidden, MLP, heads, key-value heads,
# head size, per-layer inputs, vocabulary, layers, of which share keys and values.
WIDTHS = {
    "plain": (256, 1024, 4, 2, 64, 64, 10_496, 4, 0),
    "shared": (256, 768, 4, 1, 64, 32, 10_496, 6, 2),
}
# widths, batch, tokens, supervised share, checkpointing, rank, target modules, bits, clips a row, dtype
SHAPES = {
    "quantized": ("plain", 1, 128, 0.25, True, 8, "language", 4, 0, "float32"),
    "keys and values shared": ("shared", 2, 128, 0.25, True, 16, "language", None, 0, "float32"),
    "two modules": ("shared", 1, 192, 0.5, True, 32, ("q_proj", "v_proj"), None, 0, "float32"),
    "all kept": ("shared", 1, 128, 0.25, False, 16, "language", None, 0, "float32"),
    "clips": ("plain", 1, 224, 0.1, True, 8, "language", None, 1, "float32"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_planned_is_what_a_step_takes(name, tmp_path, monkeypatch):
    for key, widths in WIDTHS.items():
        monkeypatch.setitem(plan_memory.WIDTHS, key, widths)
    monkeypatch.setitem(plan_memory.SHAPES, name, SHAPES[name])
    folder = plan_memory.checkpoint(tmp_path / "checkpoint", name)
    estimate, pieces = plan_memory.plan(folder, name)
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    ratio = estimate["peak"] / (plan_memory.measure(folder, name, pieces) - before)
    assert 0.95 <= ratio <= 1.05, (ratio, estimate)
    # Of weights alone it would be far off.
    assert estimate["weights"] < 0.75 * estimate["peak"]


@cache
def planner(size: str, rank: int = 16, bits: int | None = 4, cached: bool = True) -> Planner:
    """Of one of Google's, in bfloat16, with adapters for AdamW."""
    values = known_config(f"google/gemma-3n-{size}-it")
    if bits is not None:
        values["quantization"] = {"group_size": 64, "bits": bits}
    model = skeleton(Config.from_dict(values), mx.bfloat16)
    targets = lora.resolve_targets(model, "language" if cached else "language+audio")
    lora.attach(model, lora.AdapterConfig(targets, r=rank, lora_alpha=2.0 * rank))
    return Planner(model, moments=2, cached=cached)


def estimate(size: str, batch: int, tokens: int, pieces: Pieces | None = None, **options) -> Estimate:
    """Of a step whose tokens are all supervised but the first of each row."""
    planned = planner(size, **options)
    case = Case(batch, tokens, batch * (tokens - 1))
    return planned.estimate(case, pieces or planned.pieces(case))


@pytest.mark.parametrize("size, most", [("E2B", 5.3), ("E4B", 10.7)])
def test_2048_tokens_of_googles_checkpoints(size, most):
    assert estimate(size, 1, 2048).peak <= most * GB


@pytest.mark.parametrize("size, weights", [("E2B", 1.4), ("E4B", 2.5)])
def test_weights_of_googles_checkpoints(size, weights):
    """Of the text model in 4 bits, its embeddings among them; the per-layer table stays in its file, the audio tower
    is not there."""
    assert abs(estimate(size, 1, 512).weights / GB - weights) < 0.1


def test_bits_count():
    weights = {bits: estimate("E2B", 1, 128, bits=bits).weights for bits in (4, 8, None)}
    # 4, 8 and 16 bits a weight, and a scale and a bias of 16 bits for 64 of them; a few are never quantized.
    assert weights[8] / weights[4] == pytest.approx(8.5 / 4.5, rel=0.05)
    assert weights[None] / weights[4] == pytest.approx(16 / 4.5, rel=0.05)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_more_of_anything_takes_more(checkpointing):
    pieces = Pieces(checkpointing, 128, 32)
    lengths = [32, 64, 96, 256, 480, 512, 544, 1024, 2048]
    peaks = [estimate("E2B", 2, tokens, pieces).peak for tokens in lengths]
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]
    peaks = [estimate("E2B", batch, 256, pieces).peak for batch in (1, 2, 3, 4, 8)]
    assert peaks == sorted(set(peaks))
    peaks = [estimate("E2B", 1, 256, pieces, rank=rank).peak for rank in (4, 16, 64)]
    assert peaks == sorted(set(peaks))
    planned = planner("E2B")
    found = [planned.estimate(Case(1, 4096, rows), pieces) for rows in (8, 512, 4095)]
    peaks, losses = [e.peak for e in found], [e.loss for e in found]
    assert peaks == sorted(peaks) and losses == sorted(losses) and losses[0] < losses[-1]


def test_adapters_gradients_and_moments_by_the_rank():
    small, large = estimate("E2B", 1, 128, rank=16), estimate("E2B", 1, 128, rank=64)
    assert large.adapters == 4 * small.adapters and large.optimizer == 4 * small.optimizer
    # float32, and two moments to a weight beside itself and its gradient.
    trained = sum(x.size for _, x in tree_flatten(planner("E2B").model.trainable_parameters()))
    assert small.adapters == small.optimizer == 2 * 4 * trained


def test_recomputing_takes_less_than_keeping():
    planned, case = planner("E2B"), Case(1, 1024, 512)
    again, kept = (planned.estimate(case, Pieces(checkpointing, 128, 32)) for checkpointing in (True, False))
    assert again.saved < kept.saved / 10 and again.peak < kept.peak / 2
    assert again.weights == kept.weights


def test_smaller_pieces_take_less():
    planned, case = planner("E2B"), Case(4, 1024, 4 * 1023)
    chosen = planned.pieces(case)
    least = Pieces(True, TOKENS[0], LOGITS[0])
    assert planned.estimate(case, least).peak < planned.estimate(case, chosen).peak
    # Larger ones where the step keeps more anyway.
    small, large = planned.pieces(Case(1, 64, 32)), planned.pieces(Case(8, 8192, 8 * 8191))
    assert small == least
    assert large.tokens > small.tokens and large.logits > small.logits
    assert large.tokens <= TOKENS[1] and large.logits <= LOGITS[1]


def test_gradients_of_another_micro_batch_are_there():
    planned, case = planner("E2B"), Case(1, 1024, 512)
    for pieces in (Pieces(True, 128, 32), Pieces(False, 128, 32)):
        one, another = (planned.estimate(replace(case, another=another), pieces).peak for another in (False, True))
        assert one < another <= one + planned.adapters


def test_the_audio_tower_counts_where_it_is_trained():
    case, pieces = Case(1, 512, 128, clips=1), Pieces(True, 128, 32)
    cached = planner("E2B").estimate(case, pieces)
    trained = planner("E2B", cached=False).estimate(case, pieces)
    tower = planner("E2B", cached=False).model.audio_tower
    weights = sum(x.nbytes for n, x in tree_flatten(tower.parameters()) if "lora_" not in n)
    assert trained.weights - cached.weights == pytest.approx(weights, rel=0.02)
    assert trained.adapters > cached.adapters
    # Clips go through the tower one by one.
    more = planner("E2B", cached=False).estimate(replace(case, batch=4, supervised=512, clips=4), pieces)
    assert more.layer < 4 * trained.layer


def test_evaluation_takes_less_than_training():
    planned, pieces = planner("E2B"), Pieces(True, 128, 32)
    peaks = [planned.evaluation(tokens, 2, 128, pieces) for tokens in (256, 1024, 4096)]
    assert peaks == sorted(set(peaks))
    assert peaks[1] < planned.estimate(Case(2, 1024, 256), pieces).peak


def test_nothing_is_allocated_for_it():
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    values = {**known_config("google/gemma-3n-E4B-it"), "quantization": {"group_size": 64, "bits": 4}}
    model = skeleton(Config.from_dict(values), mx.bfloat16)
    assert sum(x.nbytes for _, x in tree_flatten(model.parameters())) > 4 * GB
    lora.attach(model, lora.AdapterConfig(lora.resolve_targets(model, "language"), r=16, lora_alpha=32.0))
    drawn = mx.random.state[0].tolist()
    planned = Planner(model, moments=2)
    for pieces in (Pieces(True, 128, 32), Pieces(False, 128, 32)):
        planned.estimate(Case(4, 1024, 512), pieces)
    # The generator's state, and what masks and scalars are traced with.
    assert max(mx.get_peak_memory(), mx.get_active_memory()) < before + 1e6
    # Nor are numbers drawn.
    assert mx.random.state[0].tolist() == drawn
