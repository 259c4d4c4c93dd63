"""A run's memory is planned, checked on its worst batch before the first step, and kept until its last."""

import gc
import json
import random
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, Optional

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from mlx_gemma3n import lora
from mlx_gemma3n.config import Config, DoesNotFit, UserError
from mlx_gemma3n.loading import load_model
from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.processor import Processor
from tests.train.few_examples import few_examples, metric_rows
from train import trainer
from train.budget import Plan, in_words, make_plan, rows_of
from train.config import TrainConfig
from train.data import TrainExample, load_examples
from train.demo import CHECKPOINT
from train.memory import Planner
from train.step import AudioEmbeds
from train.trainer import attach_adapter, hear, make_planner, preflight, train

ROOT = Path(__file__).parents[2]
PAD = 0
# Reported peaks are rounded to this.
ROUNDED = 0.1e6
# What a plan may be below what is measured.
TOLERANCE = 1.05


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Six training clips of the demo's and two for evaluation."""
    return few_examples(tmp_path_factory.mktemp("data"), train=6, valid=2)


@pytest.fixture
def base() -> int:
    """Bytes that this process holds whatever is tested: a limit is on top of them."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


@dataclass
class Watched:
    """What a run holds as each of its steps begins.

    Attributes:
        active, cached: bytes, by step.
        at: what is to happen before a step, from 1.
    """

    active: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    at: dict[int, Callable[[], None]] = field(default_factory=dict)


@pytest.fixture
def watched(monkeypatch) -> Watched:
    seen, steps = Watched(), trainer.steps

    def watching(*arguments):
        for step in steps(*arguments):
            seen.active.append(mx.get_active_memory())
            seen.cached.append(mx.get_cache_memory())
            seen.at.get(len(seen.active), lambda: None)()
            yield step

    monkeypatch.setattr(trainer, "steps", watching)
    return seen


def config(data, output, **changes) -> TrainConfig:
    settings = dict(batch_size=2, gradient_accumulation_steps=1, rank=4, learning_rate=5e-3, dtype="float32")
    return TrainConfig(model=str(CHECKPOINT), data=str(data), output=str(output), **{**settings, **changes})


def size(count: float) -> str:
    """As `--memory-limit` takes it."""
    return f"{count / 1e3:.3f}KB"


def plan_of(output: Path) -> dict:
    return json.loads((output / "plan.json").read_text())


def peaks(output: Path) -> list[float]:
    """In bytes, as reported."""
    return [1e9 * row["peak_memory_gb"] for row in metric_rows(output, "peak_memory_gb")]


def adapter(output: Path) -> dict[str, np.ndarray]:
    return {name: np.array(weight) for name, weight in lora.read_adapter(output)[1].items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def limits() -> tuple[int, int]:
    """MLX's, of all memory and of what is kept for reuse."""
    memory, cache = mx.set_memory_limit(10**9), mx.set_cache_limit(10**9)
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)
    return memory, cache


def planned(settings: TrainConfig, examples: list[TrainExample]) -> dict[tuple[bool, int], int]:
    """The peak of each way to take the steps, by whether layers are computed again and by rows."""
    planner = make_planner(settings, Config.load(CHECKPOINT), "base")
    of, accumulates = rows_of(examples, planner.model.config), settings.gradient_accumulation_steps > 1
    found, way = {}, None
    while True:
        # Everything fits, so this is the next one.
        plan = make_plan(planner, of, settings.batch_size, "auto", 10**15, accumulates, after=way)
        if plan.way == way:
            return found
        way = plan.way
        found[way.pieces.checkpointing, way.rows] = plan.peak


@dataclass
class Prepared:
    """All that `train` has when it comes to `preflight`."""

    settings: TrainConfig
    planner: Planner
    plan: Plan
    model: Gemma3n
    examples: list[TrainExample]
    audio: AudioEmbeds
    heard: int

    def preflight(self, plan: Optional[Plan] = None) -> Plan:
        plan = plan or self.plan
        return preflight(self.settings, self.planner, plan, self.model, self.examples, PAD, self.audio)


def prepare(data: Path, folder: Path, **changes) -> Prepared:
    settings = config(data, folder / "run", **changes)
    processor = Processor.from_pretrained(CHECKPOINT)
    examples = load_examples(data / "train.jsonl", processor)
    planner = make_planner(settings, Config.load(CHECKPOINT), "base")
    plan = trainer.plan_run(settings, planner, examples, [])
    model = load_model(CHECKPOINT, mx.float32)
    mx.random.seed(7)
    attached = attach_adapter(model, settings, "base")
    audio = hear(model, CHECKPOINT, attached, processor, examples, folder / "cache")
    return Prepared(settings, planner, plan, model, examples, audio, mx.get_active_memory())


def state(model: Gemma3n) -> dict:
    return {
        "parameters": {name: np.array(weight) for name, weight in tree_flatten(model.parameters())},
        "trainable": sorted(name for name, _ in tree_flatten(model.trainable_parameters())),
        "training": {path: module.training for path, module in model.named_modules()},
        "random": np.array(mx.random.state[0]).tolist(),
    }


# Checked before the first step.


@pytest.mark.parametrize(
    "targets, dropout, checkpointing",
    [("language", 0.0, "off"), ("language", 0.2, "off"), ("language", 0.2, "on"), ("language+audio", 0.2, "on")],
)
def test_the_preflight_leaves_the_model_as_it_was(data, tmp_path, targets, dropout, checkpointing):
    ready = prepare(data, tmp_path, target_modules=targets, lora_dropout=dropout, gradient_checkpointing=checkpointing)
    model = ready.model
    # B is zero at first, and then no A gets a gradient.
    for name, weight in tree_flatten(model.trainable_parameters()):
        if name.endswith("lora_b"):
            weight += 0.01 * mx.random.normal(weight.shape)
    for training in (True, False):
        model.train(training)
        before = state(model)
        plan = ready.preflight()
        after = state(model)
        assert plan.measured and replace(plan, measured=0) == ready.plan
        assert same(before.pop("parameters"), after.pop("parameters"))
        assert before == after


@pytest.mark.parametrize("targets", ["language", "language+audio"])
def test_a_run_is_the_same_with_preflight_and_without(data, tmp_path, targets):
    found = {}
    for choice in ("on", "off"):
        output = tmp_path / choice
        changes = dict(preflight=choice, target_modules=targets, lora_dropout=0.2, max_steps=2)
        train(config(data / "train.jsonl", output, **changes))
        found[choice] = adapter(output)
    assert plan_of(tmp_path / "on")["way"] == plan_of(tmp_path / "off")["way"]
    assert same(found["on"], found["off"])


def test_over_the_limit_when_measured_the_plan_becomes_leaner(data, tmp_path, base, capsys):
    """What else the process holds is in no plan. It stands in here for all that one may not foresee."""
    settings = config(data / "train.jsonl", tmp_path / "run", batch_size=6, max_steps=1)
    ways = planned(settings, load_examples(data / "train.jsonl", Processor.from_pretrained(CHECKPOINT)))
    limit = base + 1.1 * ways[True, 6]
    ballast = mx.zeros(int(0.25 * ways[True, 6]) // 4)
    mx.eval(ballast)
    assert ways[True, 3] + ballast.nbytes < limit < ways[True, 6] + ballast.nbytes
    train(replace(settings, memory_limit=size(limit)))
    printed = capsys.readouterr().out
    plan = plan_of(tmp_path / "run")
    assert plan["fits"] and plan["way"]["rows"] == 3 and plan["peak"] == ways[True, 3]
    first, *_, last = re.findall(r"worst batch, (\d) x 128 tokens: (.*) MB measured, (.*) MB planned", printed)
    assert (first[0], last[0]) == ("6", "3")
    assert 1e6 * float(first[1]) > limit > 1e6 * float(last[1])
    assert "over the limit; now it computes each layer again" in printed and "batches of 6 in parts of 3" in printed
    assert max(peaks(tmp_path / "run")) <= limit + ROUNDED
    print(printed)


def test_over_the_limit_when_measured_and_nothing_leaner(data, tmp_path, base):
    settings = config(data / "train.jsonl", tmp_path / "run", batch_size=2, max_steps=1)
    ways = planned(settings, load_examples(data / "train.jsonl", Processor.from_pretrained(CHECKPOINT)))
    settings = replace(settings, memory_limit=size(base + 1.1 * ways[True, 1]))
    ballast = mx.zeros(10**7)
    mx.eval(ballast)
    before = limits()
    with pytest.raises(DoesNotFit) as e:
        train(settings)
    assert limits() == before
    # All examples are of the length that does not fit, so a shorter one is not to be had.
    said = str(e.value)
    assert re.search(r"over the limit of .* in parts of 1: .*train.jsonl:\d \(\d+ tokens\) and 5 more; ", said)
    assert "examples of up to" not in said
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"audio_cache"}
    # Put right, the same command begins. The error's traceback holds the model.
    del ballast, e
    gc.collect()
    assert train(settings).steps == 1
    assert limits() == before


def test_a_limit_below_what_was_measured(data, tmp_path, base):
    """The same without anything else in memory: a plan that was too low by a tenth."""
    ready = prepare(data, tmp_path, batch_size=4, gradient_checkpointing="on")
    leaner = ready.preflight(replace(ready.plan, limit=base + int(0.9 * ready.plan.peak)))
    assert leaner.fits and leaner.way.rows == 2
    with pytest.raises(DoesNotFit, match=r"\d MB over the limit of .*--memory-limit \d+MB would do"):
        ready.preflight(replace(ready.plan, limit=ready.heard))


def spelled(words: int, rng: random.Random) -> str:
    """A line of a data file that has no clip."""
    said = " ".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(words))
    messages = [{"role": "user", "content": "Spell it."}, {"role": "assistant", "content": said}]
    return json.dumps({"messages": messages})


def command(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "train.lora", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )


def test_what_does_not_fit_is_said_in_one_line_that_helps(tmp_path, base):
    folder, rng = tmp_path / "data", random.Random(0)
    folder.mkdir()
    lines = [spelled(words, rng) for words in (5, 108, 8, 40, 104, 6, 45)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "valid.jsonl").write_text(spelled(5, rng))
    examples = load_examples(folder / "train.jsonl", Processor.from_pretrained(CHECKPOINT))
    arguments = ["--model", CHECKPOINT, "--data", folder, "--output", tmp_path / "run", "--rank", 4, "--max-steps", 2]
    # Enough for the examples of 40 and 45 words one by one, too little for those of a hundred.
    alone = {}
    for line in (2, 7):
        settings = config(folder, tmp_path / "run", batch_size=1, gradient_accumulation_steps=2)
        alone[line] = min(planned(settings, [examples[line - 1]]).values())
    limit = (alone[2] + alone[7]) // 2
    done = command(*arguments, "--memory-limit", size(limit))
    assert done.returncode == 3
    (said,) = done.stderr.strip().splitlines()
    print(said)
    where = f"{folder / 'train.jsonl'}:2 ({len(examples[1].input_ids)} tokens)"
    assert said.startswith(f"error: a step takes {in_words(alone[2])}, {in_words(alone[2] - limit)} over the limit of ")
    assert f": {where} and 1 more; --memory-limit " in said
    assert not (tmp_path / "run").exists()

    enough, longest = re.search(r"--memory-limit (\w+) would do, or examples of up to (\d+) tokens", said).groups()
    done = command(*arguments, "--memory-limit", enough)
    assert done.returncode == 0, done.stderr
    shorter = [line for line, e in zip(lines, examples) if len(e.input_ids) <= int(longest)]
    assert len(shorter) == 5
    (folder / "train.jsonl").write_text("\n".join(shorter))
    finished = train(config(folder, tmp_path / "shorter", batch_size=4, max_steps=2, memory_limit=size(base + limit)))
    assert finished.steps == 2


@pytest.mark.parametrize("rank, accumulation", [(4, 1), (64, 2)])
def test_no_step_takes_more_than_the_preflight(data, tmp_path, base, capsys, rank, accumulation):
    """Nor than planned. The second micro-batch of a step has the gradients of the first one beside it."""
    changes = dict(rank=rank, gradient_accumulation_steps=accumulation, gradient_checkpointing="on", epochs=1)
    train(config(data / "train.jsonl", tmp_path / "run", **changes))
    (measured,) = re.findall(r"worst batch, .*: (.*) MB measured", capsys.readouterr().out)
    reported, plan = max(peaks(tmp_path / "run")), plan_of(tmp_path / "run")["peak"]
    print(f"{in_words(reported)}; the preflight {measured} MB, planned {in_words(plan)}")
    assert 0.97e6 * float(measured) <= reported <= 1.01e6 * float(measured) + ROUNDED
    assert reported <= TOLERANCE * plan + base + ROUNDED


# Kept through the run.


@pytest.fixture(scope="module")
def parts(data, tmp_path_factory) -> dict[int, Path]:
    """Runs whose batches of five go whole, in parts of three, and one by one, by rows."""
    examples = load_examples(data / "train.jsonl", Processor.from_pretrained(CHECKPOINT))
    folder = tmp_path_factory.mktemp("parts")
    settings = config(data / "train.jsonl", folder / "5", batch_size=5, max_steps=2, optimizer="sgd", learning_rate=1.0)
    ways, found = planned(settings, examples), {}
    for rows in (5, 3, 1):
        gc.collect()
        mx.clear_cache()
        held = mx.get_active_memory()
        limit = None if rows == 5 else size(held + TOLERANCE * ways[True, rows])
        train(replace(settings, output=str(folder / str(rows)), memory_limit=limit))
        found[rows] = folder / str(rows)
        # What the process held before, a limit is on top of.
        (found[rows] / "held").write_text(str(held))
    return found


def test_a_batch_in_parts_takes_the_step_of_the_whole(parts, data, tmp_path):
    assert [plan_of(parts[rows])["way"]["rows"] for rows in parts] == list(parts)
    whole, start = adapter(parts[5]), prepare(data, tmp_path)
    # It has gone somewhere.
    first = {name: np.array(weight) for name, weight in lora.adapter_weights(start.model).items()}
    assert max(abs(whole[name] - first[name]).max() for name in whole if name.endswith("lora_b")) > 1e-2
    for rows in (3, 1):
        other = adapter(parts[rows])
        worst = max(abs(whole[name] - other[name]).max() for name in whole)
        print(f"in parts of {rows}: off by {worst:.1e}")
        assert worst <= 1e-5


def test_no_step_takes_more_than_planned(parts):
    for rows, output in parts.items():
        plan, measured = plan_of(output), max(peaks(output))
        print(f"in parts of {rows}: {in_words(measured)} measured, {in_words(plan['peak'])} planned")
        held = int((output / "held").read_text())
        assert measured <= TOLERANCE * plan["peak"] + held + ROUNDED and measured <= plan["limit"]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(e.step, float(tensor_util.make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)]
        for tag in events.PluginTagToContent("scalars")
    }


def test_the_plan_the_metrics_and_the_progress_bar_agree(data, tmp_path, base, capsys):
    output, limit = tmp_path / "run", base + 10**8
    before = limits()
    train(config(data, output, epochs=1, memory_limit=size(limit)))
    assert limits() == before
    written = capsys.readouterr()
    plan = plan_of(output)
    assert plan["fits"] and plan["limit"] == limit and plan["batch_size"] == 2
    assert plan["peak"] == max(bucket["estimate"]["peak"] for bucket in plan["buckets"]) <= limit
    assert f"memory: {in_words(plan['peak'])} planned of {in_words(limit)}" in written.out
    reported = metric_rows(output, "peak_memory_gb")
    assert [row["step"] for row in reported] == [1, 2, 3]
    assert all(0.5 * plan["peak"] < 1e9 * row["peak_memory_gb"] <= TOLERANCE * plan["peak"] + base for row in reported)
    read = scalars(output / "tensorboard")
    for name in {name for row in [*reported, *metric_rows(output, "valid_loss")] for name in row} - {"step"}:
        assert read.pop(name) == [(row["step"], pytest.approx(row[name])) for row in metric_rows(output, name)], name
    assert not read
    shown = re.findall(r"loss [\d.]+, \d+ tok/s, ([\d.]+) MB", written.err)
    for row in reported:
        assert f"{1e3 * row['peak_memory_gb']:.1f}" in shown
    assert not metric_rows(output, "event")


def test_three_hundred_steps_of_random_lengths_end_where_they_began(tmp_path, base, watched):
    """The slow one: what grows by a little with each step, or is scattered by ever new lengths, shows by then."""
    rng = random.Random(0)
    lines = [spelled(round(4 * 30 ** rng.random() ** 2), rng) for _ in range(60)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    settings = config(tmp_path, tmp_path / "run", batch_size=1, max_steps=300, gradient_checkpointing="off")
    train(settings)
    measured, plan = peaks(tmp_path / "run"), plan_of(tmp_path / "run")
    first, last = max(measured[:100]), max(measured[-100:])
    epoch, end = watched.active[len(lines)], watched.active[-1]
    print(f"peak {in_words(first)} -> {in_words(last)}, planned {in_words(plan['peak'])}; at rest {epoch} -> {end}")
    assert len(measured) == len(watched.active) == 300 and len(plan["buckets"]) > 4
    assert last - base <= 1.02 * (first - base) + ROUNDED
    assert abs(end - epoch) <= 0.02 * (epoch - base)
    assert max(measured) - base <= TOLERANCE * plan["peak"]


def test_near_the_limit_what_is_kept_for_reuse_is_given_back(data, tmp_path, base, watched):
    """Something else in the process has taken most of the limit."""
    settings = config(data / "train.jsonl", tmp_path / "run", max_steps=3, gradient_checkpointing="on")
    ways = planned(settings, load_examples(data / "train.jsonl", Processor.from_pretrained(CHECKPOINT)))
    limit = base + 15 * ways[True, 2]
    ballast = mx.zeros(int(limit - base - 1.2 * ways[True, 2]) // 4)
    mx.eval(ballast)
    train(replace(settings, memory_limit=size(limit)))
    events = metric_rows(tmp_path / "run", "event")
    assert [row["step"] for row in events] == [1, 2, 3]
    for row in events:
        taken, spare = re.fullmatch(r"memory ([\d.]+) MB of [\d.]+ MB: ([\d.]+) MB given back", row["event"]).groups()
        assert 1e6 * float(taken) > 0.9 * limit - ROUNDED and float(spare) > 0
    print(events[0]["event"])
    assert max(watched.cached[1:]) < 0.1e6
    assert max(peaks(tmp_path / "run")) <= limit


def test_the_tower_is_gone_once_the_clips_are_heard(data, tmp_path, base):
    ready = prepare(data, tmp_path)
    parts = dict(tree_flatten(ready.model.parameters()))
    tower = sum(weight.nbytes for name, weight in parts.items() if name.startswith("audio_tower."))
    rest = sum(weight.nbytes for name, weight in parts.items() if not name.startswith("audio_tower."))
    held = ready.heard - base
    print(f"held {in_words(held)}, the tower would be {in_words(tower)} more")
    assert tower > 10**6 and rest <= held <= 1.01 * rest
    mx.eval(ready.model.audio_tower.parameters())
    assert mx.get_active_memory() - ready.heard == pytest.approx(tower, rel=0.01)


@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_a_clip_that_is_lost_meanwhile_is_heard_again_and_the_tower_goes_again(
    data, tmp_path, watched, caplog, checkpointing
):
    changes = dict(epochs=1, lora_dropout=0.2, gradient_checkpointing=checkpointing)
    train(config(data / "train.jsonl", tmp_path / "whole", **changes))
    whole = watched.active[:]
    watched.active.clear()

    def damage() -> None:
        for file in (tmp_path / "run" / "audio_cache").iterdir():
            file.write_bytes(file.read_bytes()[:-10])

    watched.at[2] = damage
    train(config(data / "train.jsonl", tmp_path / "run", **changes))
    assert caplog.text.count("the clip is encoded again") >= 4
    # Dropout's masks are the same too.
    assert same(adapter(tmp_path / "run"), adapter(tmp_path / "whole"))
    assert watched.active == pytest.approx(whole, rel=0.01)


def test_a_run_is_the_same_whether_its_clips_were_heard_before(data, tmp_path):
    changes = dict(max_steps=1, lora_dropout=0.2, preflight="off")
    train(config(data / "train.jsonl", tmp_path / "cold", **changes))
    shutil.copytree(tmp_path / "cold" / "audio_cache", tmp_path / "warm" / "audio_cache")
    train(config(data / "train.jsonl", tmp_path / "warm", **changes))
    assert same(adapter(tmp_path / "cold"), adapter(tmp_path / "warm"))


def test_limits_are_put_back_when_a_step_fails(data, tmp_path):
    before = limits()
    settings = config(data / "train.jsonl", tmp_path / "run", learning_rate=1e30, max_grad_norm=None, warmup_steps=0)
    with pytest.raises(UserError, match="not a number"):
        train(settings)
    assert limits() == before
