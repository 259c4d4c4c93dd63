"""metrics.jsonl: one JSON object a line, whole lines only, there to read while the run goes on."""

import json
import math
from pathlib import Path
from typing import Any


class Metrics:
    """Appends rows to a file and flushes each."""

    def __init__(self, path: str | Path):
        self._file = open(path, "a", encoding="utf-8")

    def write(self, **row: Any) -> None:
        # JSON has no NaN; what is not a number is null.
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
