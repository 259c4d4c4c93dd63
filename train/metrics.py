"""The run's measures: metrics.jsonl, one JSON object a line, whole lines only, and the same numbers as TensorBoard's
scalars. Both are there to read while the run goes on.

TensorBoard's own writer makes the event files: it needs neither torch nor tensorflow. It writes nothing but scalars, so
what happened in words (`Metrics.event`) stands in metrics.jsonl alone.
"""

import json
import math
import tempfile
from pathlib import Path
from typing import Any, Optional

from tensorboard.summary import Writer

from mlx_gemma3n.config import UserError


class Metrics:
    """Appends rows to a file and flushes each.

    Args:
        path: the file; rows it has stay.
        tensorboard: a folder, made where there is none, for an event file beside those it has.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, path: str | Path, tensorboard: Optional[str | Path] = None):
        if tensorboard is not None:
            _make_writable(Path(tensorboard))
        self._file = open(path, "a", encoding="utf-8")
        self._writer = None if tensorboard is None else Writer(str(tensorboard))

    def write(self, step: int, **row: Any) -> None:
        """A row of metrics.jsonl, and of each number in it a scalar of that name at `step`."""
        # JSON has no NaN; what is not a number is null.
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._append({"step": step, **values})
        if self._writer is None:
            return
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def event(self, step: int, text: str) -> None:
        """A row that says what happened at `step`."""
        self._append({"step": step, "event": text})

    def close(self) -> None:
        """Closes both; a second time does nothing."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _append(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def _make_writable(folder: Path) -> None:
    # TensorBoard opens its file in a thread, which would print a traceback of its own.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise UserError(f"{folder}: cannot be written ({e.strerror}); name another folder") from None
