"""A few of the demo's examples, for runs that take seconds, and what a run wrote about itself."""

import json
import shutil
from pathlib import Path

from train.demo import DATA


def few_examples(folder: Path, train: int, valid: int) -> Path:
    """A data folder of the demo's first examples, with its clips."""
    shutil.copytree(DATA / "clips", folder / "clips")
    for name, count in (("train.jsonl", train), ("valid.jsonl", valid)):
        lines = (DATA / name).read_text().splitlines()[:count]
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def metric_rows(output: Path, key: str) -> list[dict]:
    """The rows of a run's metrics.jsonl that have `key`."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if key in row]
