"""Data folders into examples: every line is checked before the first is tokenized, every clip found before training.

An example keeps its token ids, not its features: those of 988 clips of 30 s would be 1.5 GB. They are computed from the
clip again whenever they are asked for. Loading decodes no audio either: a clip takes the same placeholders whatever it
says, so a short silence stands in for it, unless its length or its header calls for the processor's own judgement. No
mlx and no torch in here.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Optional, TypeVar

import numpy as np

from mlx_gemma3n.config import UserError
from mlx_gemma3n.processor import IGNORED, SAMPLE_RATE, Processor, read_messages

TRAIN, VALID = "train.jsonl", "valid.jsonl"
STAND_IN = np.zeros(SAMPLE_RATE // 10, np.float32)

log = logging.getLogger(__name__)
S, T = TypeVar("S"), TypeVar("T")


@dataclass(frozen=True)
class TrainExample:
    """One line of a data file, tokenized.

    Args:
        file: the data file.
        line: of the example in it, from 1.
        messages: as the line has them.
        clips: the paths of its clips, in order.
        input_ids: int32 `[tokens]`, 188 placeholders for each clip (or piece of one) among them.
        labels: int32 `[tokens]`, aligned with `input_ids`, -100 where there is nothing to learn.
        long_audio: what was asked for clips that are too long.
    """

    file: Path
    line: int
    messages: list[dict[str, Any]]
    clips: tuple[Path, ...]
    input_ids: np.ndarray
    labels: np.ndarray
    long_audio: str = "refuse"

    @property
    def where(self) -> str:
        """`file:line`, as error messages begin."""
        return f"{self.file}:{self.line}"

    def features(self, processor: Processor) -> Optional[tuple[np.ndarray, np.ndarray]]:
        """Decodes the clips.

        Returns:
            Log-mel float32 `[clips, frames, mel_bins]` and its mask bool `[clips, frames]`, True on valid frames; None
            where the example has no clips.

        Raises:
            UserError: a clip cannot be read any more, or has become another number of pieces since loading.
        """
        if not self.clips:
            return None
        try:
            example = processor(self.messages, self.clips, long_audio=self.long_audio)
        except UserError as e:
            raise UserError(f"{self.where}: {e}") from None
        if not np.array_equal(example.input_ids, self.input_ids):
            raise UserError(f"{self.where}: a clip has another length than when the run began; start again")
        return example.input_features, example.input_features_mask


def find_files(data: str | Path) -> tuple[Path, Optional[Path]]:
    """The training file of a data folder, and the one for evaluation if there is one. A .jsonl file is trained on.

    Raises:
        UserError: there is no training file.
    """
    data = Path(data)
    if data.is_file():
        train, valid = data, None
    elif data.is_dir():
        train, valid = data / TRAIN, data / VALID
    else:
        raise UserError(f"{data}: no such file or folder")
    if not train.is_file():
        raise UserError(f"{train}: no such file; a data folder has {TRAIN} and {VALID}, one example a line")
    if valid is None or not valid.is_file():
        log.warning("%s: no %s beside it, so nothing is evaluated", train, VALID)
        valid = None
    return train, valid


def load_examples(file: str | Path, processor: Processor, long_audio: str = "refuse") -> list[TrainExample]:
    """
    Args:
        file: JSON lines, each `{"messages": [...]}`; other keys are left alone. Clips are relative to its folder.
        long_audio: `refuse`, `split` or `truncate` clips that their placeholders cannot hold.

    Returns:
        The examples, in the file's order.

    Raises:
        UserError: naming the first line that is wrong, and how many more are.
    """
    file = Path(file)
    lines = _each(file, _lines(file), lambda line, text: (line, _check(text, file)))
    if not lines:
        raise UserError(f"{file}: no examples in it; write one JSON object a line")
    cut = 0

    def tokenize(line: int, messages: list[dict[str, Any]]) -> TrainExample:
        nonlocal cut
        clips = tuple(file.parent / name for name in _clip_names(messages))
        stand_ins = [_stand_in(clip, processor) for clip in clips]
        cut += sum(long for _, long in stand_ins)
        example = processor(messages, [stand_in for stand_in, _ in stand_ins], long_audio=long_audio)
        if not (example.labels[1:] != IGNORED).any():
            raise UserError("no token of an assistant in it; nothing to learn")
        return TrainExample(file, line, messages, clips, example.input_ids, example.labels, long_audio)

    examples = _each(file, lines, tokenize)
    if cut:
        most = processor.max_samples / SAMPLE_RATE
        done = "cut off there" if long_audio == "truncate" else "split into pieces"
        log.warning("%s: %d clips are longer than %.1f s and are %s", file, cut, most, done)
    return examples


def _each(file: Path, lines: Iterable[tuple[int, S]], function: Callable[[int, S], T]) -> list[T]:
    """`function` of every line, or an error that names the first bad one and counts the others."""
    results, first, more = [], None, 0
    for line, content in lines:
        try:
            results.append(function(line, content))
        except UserError as e:
            if first is None:
                first = f"{file}:{line}: {e}"
            else:
                more += 1
    if first is not None:
        others = f" ({more} more {'line is' if more == 1 else 'lines are'} wrong)" if more else ""
        raise UserError(first + others)
    return results


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, and their numbers. A byte order mark and carriage returns do no harm."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    except OSError as e:
        raise UserError(f"{file}: cannot be read ({e.strerror})") from None
    # Not splitlines: JSON strings may hold line separators of Unicode.
    for line, text in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if text := text.strip():
            yield line, text


def _check(text: bytes, file: Path) -> list[dict[str, Any]]:
    """The messages of a line, if a model can be trained on them."""
    try:
        values = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise UserError(f"not UTF-8 at byte {e.start + 1}; save the file as UTF-8") from None
    except json.JSONDecodeError as e:
        raise UserError(f"not JSON ({e.msg} at column {e.colno}); an example is one object on one line") from None
    except RecursionError:
        raise UserError("not JSON that can be read (nested too deeply)") from None
    if not isinstance(values, dict) or "messages" not in values:
        raise UserError('no "messages" in it; write {"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}')
    messages = read_messages(values["messages"])
    turns = [m["role"] for m in messages]
    first = 1 if turns[0] == "system" else 0
    for number, role in enumerate(turns[first:], first + 1):
        wanted = "assistant" if (number - first) % 2 == 0 else "user"
        if role != wanted:
            raise UserError(f"message {number}: role is {role}, want {wanted}; user and assistant take turns")
    if "assistant" not in turns:
        raise UserError("no turn of the assistant; add the answer to learn")
    for number, message in enumerate(messages, 1):
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not any(p["type"] == "audio" or p["text"].strip() for p in parts):
            raise UserError(f"message {number}: the {message['role']} says nothing; write it or leave the example out")
    for name in _clip_names(messages):
        if not isinstance(name, str) or not name or "\0" in name:
            raise UserError(f"'audio' is {name!r}; want the path of a clip")
        if not (file.parent / name).is_file():
            raise UserError(f"{name}: no such file; paths are relative to {file.parent}")
    return messages


def _clip_names(messages: list[dict[str, Any]]) -> list[Any]:
    parts = [part for m in messages if not isinstance(m["content"], str) for part in m["content"]]
    return [part["audio"] for part in parts if part["type"] == "audio"]


def _stand_in(clip: Path, processor: Processor) -> tuple[Path | np.ndarray, bool]:
    """What to tokenize in place of a clip, and whether the clip is too long for its placeholders.

    Only a clip whose header says that it surely fits has a silence for a stand-in; else it is decoded, and refused or
    split by the processor.
    """
    import soundfile

    try:
        info = soundfile.info(str(clip))
        samples = info.frames * SAMPLE_RATE / info.samplerate
    except (soundfile.SoundFileError, OSError, RuntimeError, TypeError, ValueError, ZeroDivisionError):
        return clip, False
    # A header may be off by a little: the length of an MP3 is an estimate.
    sure = len(STAND_IN) <= samples <= 0.98 * processor.max_samples
    return (STAND_IN if sure else clip), samples > processor.max_samples
