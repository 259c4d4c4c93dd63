"""Exit codes and the one line on stderr, seen from outside the process."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import errno, time
import click
from mlx_gemma3n.cli import run
from mlx_gemma3n.config import DoesNotFit, UserError

@click.command()
@click.option("--way", required=True)
@click.option("--count", type=click.IntRange(min=1), default=1)
@click.pass_context
def main(context, way, count):
    if way == "fine":
        click.echo("done")
    elif way == "user":
        raise UserError("data.jsonl:12: not JSON;\\nmend the line")
    elif way == "large":
        raise DoesNotFit("the step needs 41.2 GB, 5.2 GB over the limit of 36 GB;\\n--batch-size 2 would fit")
    elif way == "full":
        raise OSError(errno.ENOSPC, "No space left on device", "out/model.safetensors")
    elif way == "closed":
        raise PermissionError(errno.EACCES, "Permission denied", "out")
    elif way == "lost":
        open("no/such/file")
    elif way == "bug":
        raise ValueError("what?")
    elif way == "exit":
        context.exit(7)
    elif way == "sleep":
        print("sleeping", flush=True)
        time.sleep(60)

run(main)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "tool.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def start(script: Path, *args: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def result(script: Path, *args: str) -> tuple[int, str, str]:
    process = start(script, *args)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_success_is_0(script):
    assert result(script, "--way", "fine") == (0, "done\n", "")
    code, out, _ = result(script, "--help")
    assert code == 0 and "--way" in out


@pytest.mark.parametrize(
    "args, line",
    [
        (("--way", "user"), "error: data.jsonl:12: not JSON; mend the line\n"),
        (("--way", "full"), "error: out/model.safetensors: No space left on device\n"),
        (("--way", "closed"), "error: out: Permission denied\n"),
    ],
)
def test_what_the_user_can_put_right_is_one_line_and_2(script, args, line):
    assert result(script, *args) == (2, "", line)


@pytest.mark.parametrize(
    "args, words",
    [((), "--way"), (("--way", "fine", "--count", "0"), "--count"), (("--way", "fine", "--colour"), "--colour")],
)
def test_wrong_usage_is_one_line_and_2(script, args, words):
    code, out, err = result(script, *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("--help)\n")
    assert words in err


@pytest.mark.parametrize("way, words", [("bug", "ValueError: what?"), ("lost", "FileNotFoundError")])
def test_a_bug_is_1_with_its_traceback(script, way, words):
    code, _, err = result(script, "--way", way)
    assert code == 1
    assert "Traceback" in err and words in err


def test_what_does_not_fit_is_one_line_and_3(script):
    line = "error: the step needs 41.2 GB, 5.2 GB over the limit of 36 GB; --batch-size 2 would fit\n"
    assert result(script, "--way", "large") == (3, "", line)


def test_a_command_may_choose_its_code(script):
    assert result(script, "--way", "exit") == (7, "", "")


def test_an_interrupt_is_130(script):
    process = start(script, "--way", "sleep")
    assert process.stdout.readline() == "sleeping\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == "error: interrupted"
