"""The settings of a training run: one frozen dataclass, the same for the laptop and the CUDA trainer.

Names are transformers' and PEFT's where those have one. The defaults are for a few hundred to a thousand recorded clips
on a laptop. No mlx and no torch in here.
"""

import difflib
import math
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Optional

import yaml

from mlx_gemma3n.config import UserError

OPTIMIZERS = ("adamw", "sgd")
DTYPES = ("float32", "bfloat16")
LONG_AUDIO = ("refuse", "split", "truncate")
GRADIENT_CHECKPOINTING = ("auto", "on", "off")
PREFLIGHT = ("on", "off")
_A_SIZE = "it is a size such as 36GB or 900MB"
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?b)\s*", re.ASCII | re.IGNORECASE)
_UNITS = {
    f"{letter}{i}b": base**power for power, letter in enumerate("kmgt", 1) for i, base in (("", 1000), ("i", 1024))
}


class FieldError(UserError):
    """A setting has a value it cannot have."""

    def __init__(self, name: str, value: Any, allowed: str):
        super().__init__(f"{name} is {value!r}; {allowed}")
        self.field = name


def parse_size(text: str) -> int:
    """Bytes of a size as a person writes it: a number and KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of
    1024), in any case, with or without a space between.

    Raises:
        UserError: it is none, or less than a byte.
    """
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    size = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 1 <= size < math.inf:
        raise UserError(f"{text!r} is no size; {_A_SIZE}")
    return round(size)


@dataclass(frozen=True)
class TrainConfig:
    """
    Args:
        model: a checkpoint folder or Hub id.
        data: a folder with train.jsonl (and valid.jsonl), or one .jsonl file to train on.
        output: the run folder.
        adapter: an adapter folder, ours or PEFT's, to start from.
        optimizer: `adamw` or `sgd`.
        learning_rate: the peak, reached after the warm-up.
        weight_decay: pulls the adapter's weights to zero, apart from the gradient (AdamW's).
        warmup_steps: steps of linear warm-up; below 1, their share of all steps.
        min_lr_rate: where the cosine ends, as a share of `learning_rate`.
        epochs: passes over the training examples.
        max_steps: the number of optimizer steps, instead of `epochs`.
        batch_size: examples in memory at once.
        gradient_accumulation_steps: batches to an optimizer step.
        max_grad_norm: gradients are scaled down to this 2-norm; None never scales them.
        rank: of the adapters, PEFT's `r`.
        lora_alpha: an adapter's output is multiplied by lora_alpha / rank.
        lora_dropout: share of an adapter's inputs set to zero while training.
        use_rslora: multiplies by lora_alpha / sqrt(rank) instead.
        target_modules: `language`, `language+audio`, or module names.
        gradient_checkpointing: `on` computes each layer again in the backward pass instead of keeping its activations:
            a third to two thirds more time, and memory for one layer's activations instead of all layers'. `auto` is
            `off` where that fits `memory_limit`, and `on` where it does not. True and False are `on` and `off`.
        memory_limit: what the whole process's MLX arrays may take, as `parse_size` reads it; None is the device's
            recommended working set.
        preflight: `on` runs the step of the batch that takes the most memory once, on copies, before training; `off`
            does not. True and False are `on` and `off`.
        seed: of adapter initialisation, order and dropout.
        dtype: of the computation; None is float32 on the CPU and bfloat16 on Metal. Adapters are float32 always.
        steps_per_report: optimizer steps between lines of metrics.jsonl.
        steps_per_eval: optimizer steps between evaluations; None evaluates after each epoch.
        steps_per_save: optimizer steps between checkpoints; None saves after each epoch. The last step always saves.
        long_audio: clips over 30 s are refused, split into pieces that are all kept, or truncated and counted.

    Raises:
        UserError: a value that a field cannot have; the message names the field, the value and what is allowed.
    """

    model: str
    data: str
    output: str
    adapter: Optional[str] = None
    optimizer: str = "adamw"
    learning_rate: float = 2e-4
    weight_decay: float = 0.01
    warmup_steps: float = 0.05
    min_lr_rate: float = 0.1
    epochs: int = 3
    max_steps: Optional[int] = None
    batch_size: int = 4
    gradient_accumulation_steps: int = 2
    max_grad_norm: Optional[float] = 1.0
    rank: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    use_rslora: bool = False
    target_modules: str | tuple[str, ...] = "language"
    gradient_checkpointing: str = "auto"
    memory_limit: Optional[str] = None
    preflight: str = "on"
    seed: int = 0
    dtype: Optional[str] = None
    steps_per_report: int = 1
    steps_per_eval: Optional[int] = None
    steps_per_save: Optional[int] = None
    long_audio: str = "refuse"

    def __post_init__(self) -> None:
        for name in ("model", "data", "output"):
            self._text(name)
        if self.adapter is not None:
            self._text("adapter")
        self._choice("optimizer", OPTIMIZERS)
        self._number("learning_rate", above=0)
        self._number("weight_decay", least=0)
        self._number("warmup_steps", least=0)
        if self.warmup_steps >= 1:
            self._whole("warmup_steps", 0)
        self._number("min_lr_rate", least=0, most=1)
        for name in ("epochs", "batch_size", "gradient_accumulation_steps", "rank", "steps_per_report"):
            self._whole(name, 1)
        for name in ("max_steps", "steps_per_eval", "steps_per_save"):
            if getattr(self, name) is not None:
                self._whole(name, 1)
        if self.max_grad_norm is not None:
            self._number("max_grad_norm", above=0)
        self._number("lora_alpha", above=0)
        self._number("lora_dropout", least=0, below=1)
        self._whole("seed", 0)
        if not isinstance(self.use_rslora, bool):
            raise FieldError("use_rslora", self.use_rslora, "it is true or false")
        self._switch("gradient_checkpointing", GRADIENT_CHECKPOINTING)
        self._size("memory_limit")
        self._switch("preflight", PREFLIGHT)
        self._targets()
        if self.dtype is not None:
            self._choice("dtype", DTYPES)
        self._choice("long_audio", LONG_AUDIO)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _text(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, Path):
            self._set(name, value := str(value))
        if not isinstance(value, str) or not value.strip():
            raise FieldError(name, value, "it is a path or a name")

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise FieldError(name, value, f"it is one of {', '.join(choices)}")

    def _switch(self, name: str, choices: tuple[str, ...]) -> None:
        # YAML 1.1 reads `on` and `off`, without quotes, as true and false.
        if isinstance(value := getattr(self, name), bool):
            self._set(name, "on" if value else "off")
        self._choice(name, choices)

    def _size(self, name: str) -> None:
        if (value := getattr(self, name)) is None:
            return
        try:
            parse_size(value)
        except UserError:
            raise FieldError(name, value, _A_SIZE) from None

    def _number(
        self,
        name: str,
        least: float = -math.inf,
        most: float = math.inf,
        above: float = -math.inf,
        below: float = math.inf,
    ) -> None:
        limits = {"at least": least, "more than": above, "at most": most, "less than": below}
        bounds = [f"{word} {limit}" for word, limit in limits.items() if abs(limit) < math.inf]
        allowed = f"it is a number, {' and '.join(bounds)}"
        value = given = getattr(self, name)
        if isinstance(value, str):
            # YAML 1.1 reads 1e-4, without a point, as text.
            try:
                value = float(value)
            except ValueError:
                raise FieldError(name, given, allowed) from None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise FieldError(name, given, allowed)
        if not (least <= value <= most and above < value < below):
            raise FieldError(name, given, allowed)
        self._set(name, float(value))

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        integral = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1
        if not integral or value < least:
            raise FieldError(name, value, f"it is a whole number from {least} up")
        if value >= 2**31:
            raise FieldError(name, value, f"it is below {2**31}")
        self._set(name, int(value))

    def _targets(self) -> None:
        value = self.target_modules
        if isinstance(value, list):
            value = tuple(value)
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, tuple) or not names or not all(isinstance(n, str) and n.strip() for n in names):
            raise FieldError("target_modules", self.target_modules, "it is language, language+audio, or module names")
        self._set("target_modules", value)

    @property
    def memory_limit_bytes(self) -> Optional[int]:
        """`memory_limit` in bytes; None where the device's own limit holds."""
        return None if self.memory_limit is None else parse_size(self.memory_limit)

    def total_steps(self, batches_per_epoch: int) -> int:
        """Optimizer steps of the run. The last step of an epoch takes the batches that are left, however few."""
        if self.max_steps is not None:
            return self.max_steps
        return self.epochs * math.ceil(batches_per_epoch / self.gradient_accumulation_steps)

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Linear warm-up, then a cosine down to `min_lr_rate` of the peak.

        Args:
            step: of the optimizer, from 0.
            total_steps: of the run.

        Returns:
            The rate of this step: never zero in the warm-up, the peak on the first step after it. From there on that of
            transformers' `cosine_with_min_lr`.
        """
        warmup = self.warmup_steps if self.warmup_steps >= 1 else math.ceil(self.warmup_steps * total_steps)
        if step < warmup:
            return self.learning_rate * (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.learning_rate * (self.min_lr_rate + (1.0 - self.min_lr_rate) * share)

    def to_yaml(self) -> str:
        """Every field, as `from_yaml` reads it."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)

    @classmethod
    def from_yaml(cls, path: str | Path, **overrides: Any) -> "TrainConfig":
        """
        Args:
            path: a YAML file of fields; what it leaves out has its default.
            overrides: fields that come before the file's, as a command line's options do. Paths in the file, like those
                in options, are relative to the working folder.

        Raises:
            UserError: naming the file and the line: not YAML, a field that does not exist, is given twice or has a
                value it cannot have.
        """
        values, lines = _read_yaml(Path(path))
        known = [f.name for f in fields(cls)]
        for name, line in lines.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise UserError(f"{path}:{line}: no setting is called {name}; {hint}")
        values = {**values, **overrides}
        for name in ("model", "data", "output"):
            if values.get(name) is None:
                raise UserError(f"{path}: {name} is missing; add a line `{name}: ...` or give --{name}")
        try:
            return cls(**values)
        except FieldError as e:
            if e.field in overrides or e.field not in lines:
                raise
            raise UserError(f"{path}:{lines[e.field]}: {e}") from None


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The file's fields, and the line each stands in."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot be read ({e})") from None
    try:
        node, values = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else f"{path}"
        problem = getattr(e, "problem", None) or " ".join(str(e).split())
        raise UserError(f"{where}: not YAML ({problem})") from None
    if node is None:
        return {}, {}
    if not isinstance(values, dict):
        raise UserError(f"{path}:{node.start_mark.line + 1}: not a list of settings; each line is `name: value`")
    lines: dict[str, int] = {}
    for key, _ in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines:
            raise UserError(f"{path}:{line}: {name} is given twice, first in line {lines[name]}")
        lines[name] = line
    return values, lines
