"""Which batches there will be, what each takes, and what is done where that is too much."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_gemma3n.config import Config
from train import budget
from train.budget import Row, Way, full_fine_tuning, held_to, in_words, make_plan, rows_of, rows_up_to, ways
from train.config import TrainConfig
from train.data import load_examples
from train.demo import CHECKPOINT, DATA
from train.memory import LOGITS, TOKENS, Case, Planner
from train.plan import known_config
from train.step import Pieces
from train.trainer import make_planner

LEAST = Pieces(True, TOKENS[0], LOGITS[0])
ENDLESS = 10**15


@pytest.fixture(scope="module")
def planner() -> Planner:
    """Of E2B in 4 bits and bfloat16, with the usual adapter."""
    values = {**known_config("google/gemma-3n-E2B-it"), "quantization": {"group_size": 64, "bits": 4}}
    return make_planner(TrainConfig("-", "-", "-", dtype="bfloat16"), Config.from_dict(values), "-")


def row(tokens: int, supervised: int = 8, clips: int = 0, line: int = 1) -> Row:
    return Row(tokens, supervised, clips, f"train.jsonl:{line}")


def plan(planner, rows, batch_size=4, gradient_checkpointing="auto", limit=ENDLESS, accumulates=False, **more):
    return make_plan(planner, rows, batch_size, gradient_checkpointing, limit, accumulates, **more)


# Buckets.


def test_lengths_are_padded_to_32(planner):
    found = plan(planner, [row(n) for n in (1, 31, 32, 33, 64, 65)])
    assert [(b.tokens, b.examples) for b in found.buckets] == [(32, 3), (64, 2), (96, 1)]
    assert [b.longest.tokens for b in found.buckets] == [32, 64, 65]
    assert found.longest == row(65) and found.worst is found.buckets[-1]


def test_shorter_rows_fill_a_batch_up(planner):
    rows = [row(20, supervised=19, clips=2), row(30, line=2), row(100, supervised=5, line=3), row(200, line=4)]
    cases = [b.case for b in plan(planner, rows, batch_size=3).buckets]
    # Of rows, as many as there are up to this length; of labels and clips, the most that one of them has.
    assert cases == [Case(2, 32, 38, 4), Case(3, 128, 57, 6), Case(3, 224, 57, 6)]


def test_more_examples_than_a_batch_holds(planner):
    found = plan(planner, [row(40, line=i) for i in range(50)], batch_size=8)
    assert found.buckets[0].examples == 50 and found.buckets[0].case == Case(8, 64, 64, 0)


def test_micro_batches_that_follow_another(planner):
    rows = [row(512, line=i) for i in range(4)]
    assert [b.case.another for b in plan(planner, rows, accumulates=True).buckets] == [True]
    assert [b.case.another for b in plan(planner, rows).buckets] == [False]
    # Parts of one batch follow each other too.
    parts = plan(planner, rows, limit=1)
    assert parts.way.rows == 1 and [b.case.another for b in parts.buckets] == [True]


def test_rows_of_examples():
    from mlx_gemma3n.processor import Processor

    config = Config.load(CHECKPOINT)
    examples = load_examples(DATA / "train.jsonl", Processor.from_pretrained(CHECKPOINT))
    rows = rows_of(examples, config)
    assert len(rows) == len(examples)
    for found, example in zip(rows, examples):
        assert found.tokens == len(example.input_ids) and found.where == example.where
        assert found.clips == len(example.clips) == 1
        assert found.supervised == int(np.sum(example.labels != -100))
        assert type(found.tokens) is type(found.supervised) is type(found.clips) is int


def test_rows_up_to_a_length():
    rows = rows_up_to(1500, 2)
    assert [r.tokens for r in rows] == [128, 128, 256, 256, 512, 512, 1024, 1024, 1500, 1500]
    assert all(r.supervised == r.tokens - 1 and not r.clips for r in rows)
    assert [r.tokens for r in rows_up_to(2, 1)] == [2] and [r.tokens for r in rows_up_to(128, 1)] == [128]


# Ways.


def test_the_order_of_ways(planner):
    case = Case(4, 1024, 4096)
    pieces = planner.pieces(case)
    assert pieces != LEAST
    keep = Pieces(False, pieces.tokens, pieces.logits)
    found = {mode: [(w.pieces, w.rows) for w in ways(planner, case, mode)] for mode in ("auto", "on", "off")}
    on = [(p, rows) for rows in (4, 2, 1) for p in (pieces, LEAST)]
    assert found["on"] == on
    assert found["auto"] == [(keep, 4), *on]
    assert found["off"] == [(keep, 4), (keep, 2), (keep, 1)]


def test_odd_batches_are_halved_upwards(planner):
    assert [w.rows for w in ways(planner, Case(5, 64, 64), "off")] == [5, 3, 2, 1]
    assert [w.rows for w in ways(planner, Case(1, 64, 64), "off")] == [1]


def test_pieces_that_are_the_least_already_are_there_once(planner):
    case = Case(1, 32, 8)
    assert planner.pieces(case) == LEAST
    assert [w.pieces for w in ways(planner, case, "on")] == [LEAST]


def test_each_way_says_what_it_costs(planner):
    for way in ways(planner, Case(4, 1024, 4096), "auto"):
        text = " ".join(way.does)
        assert ("again" in text) == way.pieces.checkpointing
        assert ("smaller pieces" in text) == (way.pieces == LEAST)
        assert (f"parts of {way.rows}" in text) == (way.rows < 4)


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_each_way_is_leaner(planner, mode):
    peaks = []
    for way in ways(planner, Case(4, 2048, 4 * 2047), mode):
        case = Case(way.rows, 2048, way.rows * 2047, another=way.rows < 4)
        peaks.append(planner.estimate(case, way.pieces).peak)
    assert peaks == sorted(set(peaks), reverse=True)


# The plan.


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row(n, supervised=n // 2, line=i) for i, n in enumerate([200, 900, 1500, 2000, 2000, 2000, 2000], 1)]


def peaks_by_way(planner, rows, mode="auto") -> list[tuple[Way, int]]:
    """Each way, and the peak of a plan that is left no other than this and leaner ones."""
    found, after = [], None
    while True:
        chosen = plan(planner, rows, gradient_checkpointing=mode, after=after)
        if chosen.way == after:
            return found
        found.append((chosen.way, chosen.peak))
        after = chosen.way


@pytest.mark.parametrize("mode, count", [("auto", 7), ("on", 6), ("off", 3)])
def test_the_first_way_that_fits(planner, rows, mode, count):
    found = peaks_by_way(planner, rows, mode)
    assert len(found) == count
    for way, peak in found:
        exact, short = (plan(planner, rows, gradient_checkpointing=mode, limit=limit) for limit in (peak, peak - 1))
        assert exact.fits and exact.way == way and exact.peak == peak
        assert short.way != way or not short.fits
    # Without one that fits it is the leanest, and says so.
    last, least = found[-1]
    none = plan(planner, rows, gradient_checkpointing=mode, limit=least - 1)
    assert none.way == last and not none.fits and none.peak == least
    assert none.way.rows == 1
    # Shorter batches fit all the same.
    assert none.buckets[0].fits and not none.worst.fits


def test_after_the_leanest_there_is_none(planner, rows):
    last = plan(planner, rows, limit=1)
    again = plan(planner, rows, limit=1, after=last.way)
    assert again == last


def test_after_a_way_come_leaner_ones_only(planner, rows):
    first = plan(planner, rows)
    second = plan(planner, rows, after=first.way)
    assert not first.way.pieces.checkpointing and second.way.pieces.checkpointing
    assert second.peak < first.peak


def test_a_batch_is_no_larger_than_the_data(planner):
    found = plan(planner, [row(64), row(64, line=2)], batch_size=16)
    assert found.batch_size == 16 and found.way.rows == 2 and found.buckets[0].case.batch == 2


def test_the_worst_bucket_is_the_plans(planner, rows):
    found = plan(planner, rows, limit=4 * 10**9)
    assert found.peak == found.worst.estimate.peak == max(b.estimate.peak for b in found.buckets)
    assert [b.fits for b in found.buckets] == [b.estimate.peak <= found.limit for b in found.buckets]
    assert found.fits == all(b.fits for b in found.buckets)


def test_as_json(planner, rows):
    found = plan(planner, rows, limit=10**10)
    values = json.loads(json.dumps(found.to_dict()))
    assert set(values) == {"fits", "peak", "worst", "limit", "batch_size", "way", "buckets", "full"} | {
        "longest_valid",
        "evaluation",
        "measured",
    }
    assert values["peak"] == found.peak and values["fits"] is found.fits and values["worst"] == found.worst.tokens
    assert values["way"] == {"pieces": vars(found.way.pieces), "rows": found.way.rows, "does": list(found.way.does)}
    assert len(values["buckets"]) == len(found.buckets)
    for bucket, given in zip(values["buckets"], found.buckets):
        assert bucket["estimate"] == vars(given.estimate) and bucket["case"] == vars(given.case)
        assert bucket["longest"] == vars(given.longest)
        assert (bucket["tokens"], bucket["examples"], bucket["fits"]) == (given.tokens, given.examples, given.fits)


def test_what_is_evaluated_counts_too(planner, rows):
    """A validation example longer than all others makes a run not fit, and a shorter one changes nothing."""
    free = plan(planner, rows, limit=10**10)
    assert free.evaluation == 0 and free.longest_valid is None
    short, long = row(40, 5), row(100_000, 50)
    tight = plan(planner, rows, limit=2 * free.peak, valid=[short])
    assert tight.fits and 0 < tight.evaluation < tight.peak and tight.longest_valid == short
    over = plan(planner, rows, limit=2 * free.peak, valid=[short, long])
    assert not over.fits and over.peak <= over.limit < over.evaluation and over.longest_valid == long


def test_all_weights_instead():
    """Weights, gradients and both moments, 2 bytes each, of all but the vision tower."""
    e2b, e4b = (full_fine_tuning(Config.from_dict(known_config(f"google/gemma-3n-{s}-it"))) for s in ("E2B", "E4B"))
    assert e2b / 8 == pytest.approx(5.1e9, rel=0.02) and e4b / 8 == pytest.approx(7.5e9, rel=0.02)


# MLX's limits.


def limits() -> tuple[int, int]:
    """Of memory and cache. Reading one sets it, so it is set back."""
    memory, cache = mx.set_memory_limit(10**9), mx.set_cache_limit(10**9)
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)
    return memory, cache


def test_limits_hold_inside_and_are_as_before_after(planner, rows):
    found, before = replace(plan(planner, rows), limit=100 * 10**9), limits()
    with held_to(found):
        assert limits() == (found.limit, found.limit - found.peak)
    assert limits() == before
    with pytest.raises(KeyError):
        with held_to(found):
            raise KeyError
    assert limits() == before
    # Over the limit there is no room to keep what is freed.
    with held_to(replace(found, limit=1000)):
        assert limits() == (1000, 0)
    assert limits() == before


def test_limits_in_limits(planner, rows):
    found, before = plan(planner, rows), limits()
    with held_to(replace(found, limit=40 * 10**9)):
        with held_to(replace(found, limit=20 * 10**9)):
            assert limits()[0] == 20 * 10**9
        assert limits()[0] == 40 * 10**9
    assert limits() == before


def test_the_devices_limit():
    assert 0 < budget.recommended_limit() < 10**13


@pytest.mark.parametrize(
    "size, words",
    [(0, "0 kB"), (123_456, "123 kB"), (999_900_000, "999.9 MB"), (10**9, "1.00 GB"), (36 * 10**9, "36.00 GB")],
)
def test_in_words(size, words):
    assert in_words(size) == words
