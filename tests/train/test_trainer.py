"""The whole loop on a real checkpoint and real clips: what it writes, what it learns, what stops it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from convert.adapter import to_hf
from mlx_gemma3n import load, lora
from mlx_gemma3n.config import UserError
from mlx_gemma3n.generate import generate
from tests.train.few_examples import few_examples, metric_rows
from train.batching import collate
from train.config import TrainConfig
from train.data import load_examples
from train.demo import CHECKPOINT, DATA
from train.evaluate import evaluate, silence
from train.lora import main
from train.trained_audio import TrainedAudio, clips_of
from train.trainer import steps, train

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Six training clips and three for evaluation, of the demo's."""
    return few_examples(tmp_path_factory.mktemp("data"), train=6, valid=3)


def config(data, output, **changes) -> TrainConfig:
    settings = dict(epochs=2, batch_size=2, gradient_accumulation_steps=2, rank=4, learning_rate=5e-3)
    return TrainConfig(model=str(CHECKPOINT), data=str(data), output=str(output), **{**settings, **changes})


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "run"
    return train(config(data, output)), output


def test_what_a_run_leaves(run):
    finished, output = run
    # Three batches an epoch, two to a step: the last step of an epoch takes the one that is left.
    assert finished.steps == 4
    assert sorted(p.name for p in (output / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    assert {p.name for p in output.iterdir()} == {
        "adapter",
        "audio_cache",
        "checkpoints",
        "config.yaml",
        "data.json",
        "metrics.jsonl",
        "plan.json",
        "tensorboard",
    }
    assert yaml.safe_load((output / "config.yaml").read_text())["rank"] == 4
    assert json.loads((output / "data.json").read_text()) == {"train_examples": 6, "valid_examples": 3, "clips": 9}
    training = metric_rows(output, "loss")
    assert [row["step"] for row in training] == [1, 2, 3, 4]
    assert training[-1]["epoch"] == 2 and training[-1]["loss"] < training[0]["loss"]
    assert all(row["tokens_per_second"] > 0 and row["peak_memory_gb"] > 0 for row in training)
    assert [row["step"] for row in metric_rows(output, "valid_loss")] == [0, 2, 4]
    assert finished.after.loss < finished.before.loss


def test_the_adapter_on_disk_is_the_trained_model(run):
    finished, output = run
    model, _ = load(CHECKPOINT, adapter=output)
    ids = mx.array(np.random.default_rng(0).integers(10, 480, (1, 20)))
    assert (model(ids) == finished.model(ids)).all()
    newest, _ = lora.read_adapter(output / "checkpoints" / "step-000004")
    assert newest == lora.read_adapter(output)[0]


def test_the_same_seed_gives_the_same_adapter(run, data, tmp_path):
    _, output = run
    train(config(data, tmp_path / "again"))
    first, second = lora.read_adapter(output)[1], lora.read_adapter(tmp_path / "again")[1]
    assert all((first[name] == second[name]).all() for name in first)


def test_exact_match_is_what_generation_gives(run):
    finished, _ = run
    processor, examples = finished.processor, load_examples(DATA / "train.jsonl", finished.processor, "refuse")[:8]
    pad = processor.tokenizer.pad_token_id
    embeds = TrainedAudio(clips_of(processor))
    right = 0
    for example in examples:
        answer = example.labels[example.labels != -100].tolist()
        first = int(np.flatnonzero(example.labels != -100)[0])
        features, mask = example.features(processor)
        ids = generate(
            finished.model,
            example.input_ids[:first],
            features,
            mask,
            max_tokens=len(answer),
            eos_token_ids=processor.eos_token_ids,
        )
        right += list(ids) == answer
    result = evaluate(finished.model, examples, 3, pad, embeds)
    assert result.exact_match == right / len(examples)
    assert evaluate(finished.model, examples, 8, pad, embeds).loss == pytest.approx(result.loss, abs=1e-5)


def test_silence_is_another_input(run):
    finished, _ = run
    pad = finished.processor.tokenizer.pad_token_id
    silent = evaluate(finished.model, finished.valid, 2, pad, silence(finished.processor))
    assert silent.loss != finished.after.loss


def test_audio_adapters_train_inside_the_step(data, tmp_path):
    output = tmp_path / "run"
    finished = train(config(data, output, target_modules="language+audio", max_steps=2, lora_dropout=0.1))
    assert not (output / "audio_cache").exists()
    moved = [n for n, w in lora.adapter_weights(finished.model).items() if n.endswith("lora_b") and w.any()]
    assert any(name.startswith("audio_tower.") for name in moved)


def test_starting_from_an_adapter(run, data, tmp_path):
    _, output = run
    finished = train(config(data, tmp_path / "more", adapter=str(output), max_steps=1, optimizer="sgd"))
    assert finished.before.loss == pytest.approx(metric_rows(output, "valid_loss")[-1]["valid_loss"], abs=1e-5)


def test_starting_from_an_adapter_of_pefts(run, data, tmp_path):
    """Its rank, alpha and modules stay its own, and a run goes on where it stands."""
    _, output = run
    to_hf(output, tmp_path / "peft")
    finished = train(config(data, tmp_path / "more", adapter=str(tmp_path / "peft"), rank=9, max_steps=1))
    assert finished.before.loss == pytest.approx(metric_rows(output, "valid_loss")[-1]["valid_loss"], abs=1e-5)
    assert lora.read_adapter(finished.adapter)[0].r == 4


def test_every_example_every_epoch(run):
    finished, _ = run
    examples = load_examples(DATA / "train.jsonl", finished.processor, "refuse")
    settings = config("data", "output", batch_size=4, gradient_accumulation_steps=3)
    seen, ends = [], 0
    for epoch, ends_epoch, micro in steps(examples, settings, 0):
        seen += [e.line for batch in micro for e in batch.examples]
        ends += ends_epoch
        if ends == 2:
            break
    assert epoch == 2
    assert sorted(seen) == sorted([e.line for e in examples] * 2)


def test_a_loss_that_is_no_number_stops_with_one_line(data, tmp_path):
    with pytest.raises(UserError, match="not a number, on .*train.jsonl:.*lower --learning-rate"):
        train(config(data, tmp_path / "run", learning_rate=1e30, max_grad_norm=None, warmup_steps=0))


@pytest.mark.parametrize("targets", ["language", "language+audio"])
def test_a_broken_clip_stops_the_run_before_its_first_step(data, tmp_path, targets):
    broken = shutil.copytree(data, tmp_path / "data")
    clip = json.loads((broken / "train.jsonl").read_text().splitlines()[4])["messages"][0]["content"][0]["audio"]
    (broken / clip).write_bytes((broken / clip).read_bytes()[:2000])
    with pytest.raises(UserError, match=rf"train.jsonl:5: .*{clip}"):
        train(config(broken, tmp_path / "run", target_modules=targets))
    # The same command begins once the clip is there again, and finds what was encoded.
    assert {p.name for p in (tmp_path / "run").iterdir()} <= {"audio_cache"}
    shutil.copy(data / clip, broken / clip)
    assert train(config(broken, tmp_path / "run", target_modules=targets, max_steps=1)).steps == 1


def test_an_existing_run_is_not_overwritten(run, data):
    _, output = run
    with pytest.raises(UserError, match="exists already"):
        train(config(data, output))


def command(*arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "train.lora", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, **options
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "m"], "--data is missing"),
        (["--model", "no-such-model", "--data", "DATA"], "no-such-model: no such checkpoint folder"),
        (["--model", "MODEL", "--data", "nowhere"], "nowhere: no such file or folder"),
        (["--model", "MODEL", "--data", "DATA", "--rank", "0"], "rank is 0"),
        (["--model", "MODEL", "--data", "DATA", "--target-modules", "q_porj"], "target module q_porj"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["--rnak", "3"], "No such option"),
    ],
)
def test_bad_options_are_one_line(arguments, message, data, tmp_path):
    places = {"MODEL": CHECKPOINT, "DATA": data}
    done = command(*[places.get(a, a) for a in arguments], "--output", tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_ctrl_c_keeps_the_adapter(data, tmp_path):
    output = tmp_path / "run"
    arguments = ["--model", CHECKPOINT, "--data", data, "--output", output, "--epochs", 1000]
    process = subprocess.Popen(
        [sys.executable, "-m", "train.lora", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (output.exists() and (output / "metrics.jsonl").exists() and metric_rows(output, "loss")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err and "the adapter so far is in" in out
    lora.read_adapter(output)


def test_help_names_every_setting():
    text = CliRunner().invoke(main, ["--help"]).output
    for name in TrainConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text


def test_accumulation_is_the_batch(data, tmp_path):
    """Four of one against one of four, the whole command long: the same adapter after a step."""
    one = train(config(data, tmp_path / "a", batch_size=1, gradient_accumulation_steps=6, max_steps=1, optimizer="sgd"))
    six = train(config(data, tmp_path / "b", batch_size=6, gradient_accumulation_steps=1, max_steps=1, optimizer="sgd"))
    a, b = lora.adapter_weights(one.model), lora.adapter_weights(six.model)
    assert all(mx.abs(a[n] - b[n]).max().item() <= 1e-5 for n in a)
    assert collate(one.valid, 0).supervised_tokens > 0
