"""metrics.jsonl and TensorBoard's files, read back by TensorBoard's own reader."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from mlx_gemma3n.config import UserError
from train.metrics import Metrics

ROOT = Path(__file__).parents[2]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(e.step, float(tensor_util.make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)]
        for tag in events.PluginTagToContent("scalars")
    }


def test_without_a_folder_there_is_only_the_file(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(step=1, loss=2.5)
    metrics.event(1, "checkpoint saved")
    metrics.close()
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.5}, {"step": 1, "event": "checkpoint saved"}]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_both_can_be_read_while_the_run_goes_on(tmp_path):
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "run" / "tensorboard"
    metrics = Metrics(path, folder)
    for step in (1, 2):
        metrics.write(step=step, epoch=step / 2, loss=0.1 * step, tokens=7 * step)
        assert rows(path)[-1] == {"step": step, "epoch": step / 2, "loss": 0.1 * step, "tokens": 7 * step}
        assert scalars(folder)["tokens"] == [(s, 7.0 * s) for s in range(1, step + 1)]
    metrics.close()
    read = scalars(folder)
    assert sorted(read) == ["epoch", "loss", "tokens"]
    assert read["loss"] == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2))]


def test_what_is_not_a_finite_number_is_no_scalar(tmp_path):
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    metrics = Metrics(path, folder)
    metrics.write(step=1, loss=math.nan, grad_norm=math.inf, rate=1e-4, last=True, note="warm-up", size=None)
    metrics.write(step=2, loss=1.0, grad_norm=-math.inf)
    metrics.close()
    first = {"step": 1, "loss": None, "grad_norm": None, "rate": 1e-4, "last": True, "note": "warm-up", "size": None}
    assert rows(path) == [first, {"step": 2, "loss": 1.0, "grad_norm": None}]
    assert scalars(folder) == {"rate": [(1, pytest.approx(1e-4))], "loss": [(2, 1.0)]}


def test_an_event_is_a_row_of_words(tmp_path):
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    metrics = Metrics(path, folder)
    metrics.write(step=3, loss=1.0)
    metrics.event(3, "Schritt übersprungen:\nthe gradient is not a number")
    metrics.close()
    assert rows(path)[1] == {"step": 3, "event": "Schritt übersprungen:\nthe gradient is not a number"}
    assert scalars(folder) == {"loss": [(3, 1.0)]}


def test_opened_again_both_go_on(tmp_path):
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    for step in (1, 2):
        metrics = Metrics(path, folder)
        metrics.write(step=step, loss=1.0 / step)
        metrics.close()
        metrics.close()
    assert [row["step"] for row in rows(path)] == [1, 2]
    assert scalars(folder) == {"loss": [(1, 1.0), (2, 0.5)]}


@pytest.mark.parametrize("name", ["file", "file/tensorboard"])
def test_a_folder_that_cannot_be_written(tmp_path, name):
    (tmp_path / "file").write_text("a file where a folder should be")
    with pytest.raises(UserError) as e:
        Metrics(tmp_path / "metrics.jsonl", tmp_path / name)
    assert str(e.value).startswith(f"{tmp_path / name}: cannot be written (") and "\n" not in str(e.value)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_neither_torch_nor_tensorflow_nor_mlx_is_needed(tmp_path):
    script = """
import sys
sys.modules.update(torch=None, tensorflow=None, mlx=None)
from train.metrics import Metrics
metrics = Metrics(sys.argv[1] + "/metrics.jsonl", sys.argv[1] + "/tensorboard")
metrics.write(step=1, loss=0.5)
metrics.close()
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert scalars(tmp_path / "tensorboard") == {"loss": [(1, 0.5)]}
