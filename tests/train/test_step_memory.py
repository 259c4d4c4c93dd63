"""The memory of a step at small widths, as tests/benchmarks/step_memory.py measures it at E2B's, each in a process of
its own: beside mlx-lm's step, and as texts grow longer."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.benchmarks import step_memory
from tests.benchmarks.checkpoints import random_checkpoint

# E2B's proportions at an eighth of its width and vocabulary; a window that all texts are longer than.
TEXT = dict(
    vocab_size=32_768,
    vocab_size_per_layer_input=32_768,
    hidden_size=256,
    hidden_size_per_layer_input=32,
    intermediate_size=1024,
    num_hidden_layers=5,
    num_kv_shared_layers=0,
    head_dim=32,
    laurel_rank=8,
    sliding_window=64,
    activation_sparsity_pattern=[0.95] * 5,
)
TOKENS = (256, 512, 1024)


def measured(folder: Path, tokens: int, who: str) -> dict:
    command = [sys.executable, step_memory.__file__, "--folder", folder, "--tokens", str(tokens), "--measure", who]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=step_memory.ROOT)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict[tuple[str, int], dict]:
    """What was measured, by who took the step and of how many tokens."""
    folder = random_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint", TEXT)
    runs = [("ours", tokens) for tokens in reversed(TOKENS)] + [("mlx-lm", TOKENS[0])]
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(runs, pool.map(lambda run: measured(folder, run[1], run[0]), runs)))
    print(*found.values(), sep="\n")
    return found


def over_weights(step: dict) -> float:
    assert step["over_weights_gb"] > 0
    return step["over_weights_gb"]


def test_both_take_the_same_step(steps):
    """Else two things would be compared. The peer reads the same text, and its supervised half is one token later."""
    assert steps["ours", TOKENS[0]]["loss"] == pytest.approx(steps["mlx-lm", TOKENS[0]]["loss"], rel=0.01)


def test_a_step_takes_a_quarter_of_mlx_lms_at_most(steps):
    assert over_weights(steps["ours", TOKENS[0]]) <= over_weights(steps["mlx-lm", TOKENS[0]]) / 4


@pytest.mark.parametrize("tokens", TOKENS[:-1])
def test_twice_the_tokens_take_twice_the_memory_at_most(steps, tokens):
    assert over_weights(steps["ours", 2 * tokens]) <= 2.1 * over_weights(steps["ours", tokens])
