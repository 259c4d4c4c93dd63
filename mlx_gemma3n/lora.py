"""Low-rank adapters (LoRA, arXiv:2106.09685): which modules take them, attach, detach, read and write.

The layers are mlx-lm's `LoRALinear`. What is ours is the choice of modules. PEFT picks them by the end of their name,
so `q_proj` also hits the audio tower's; here a run, an adapter folder and an exported config all name full paths. The
KV-shared layers' dead key and value projections do not exist in our model, so nothing can be attached to them.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

from mlx_gemma3n.config import UserError
from mlx_gemma3n.files import write_aside

FORMAT, FORMAT_VERSION = "mlx-gemma3n-lora", 1
WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"

LANGUAGE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AUDIO = ("q_proj", "k_proj", "v_proj", "post", "ffw_layer_1", "ffw_layer_2", "linear_start", "linear_end")
PRESETS = {
    "language": LANGUAGE,
    "language+audio": (*LANGUAGE, *(f"audio_tower.{name}" for name in AUDIO)),
}


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter is, every field named as in PEFT's `LoraConfig`.

    `target_modules` are full paths, sorted. `rank_pattern` and `alpha_pattern` hold the paths that differ from `r` and
    `lora_alpha`.
    """

    target_modules: tuple[str, ...]
    r: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    base_model_name_or_path: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_modules", tuple(sorted(self.target_modules)))
        if not self.target_modules:
            raise UserError("target_modules is empty; an adapter needs a module")
        for path in self.target_modules:
            if not isinstance(self.rank(path), int) or self.rank(path) < 1:
                raise UserError(f"rank {self.rank(path)!r} of {path}; a rank is a whole number from 1 up")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise UserError(f"lora_dropout {self.lora_dropout!r}; it is at least 0 and less than 1")

    def rank(self, path: str) -> int:
        return self.rank_pattern.get(path, self.r)

    def scale(self, path: str) -> float:
        """What multiplies `x @ lora_a @ lora_b`: alpha / r, and alpha / sqrt(r) under rsLoRA (arXiv:2312.03732)."""
        rank, alpha = self.rank(path), self.alpha_pattern.get(path, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    @property
    def adapts_audio(self) -> bool:
        """Whether a clip's soft tokens depend on the adapter, so that they cannot be computed once and kept."""
        return any(path.startswith(("audio_tower.", "embed_audio.")) for path in self.target_modules)


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear map of `model` that can take an adapter, by its path; those with an adapter count too."""
    kinds = (nn.Linear, nn.QuantizedLinear, LoRALinear)
    found = {path: module for path, module in model.named_modules() if isinstance(module, kinds)}
    return {
        path: m for path, m in sorted(found.items()) if not isinstance(found.get(path.rpartition(".")[0]), LoRALinear)
    }


def resolve_targets(model: nn.Module, targets: str | Sequence[str]) -> tuple[str, ...]:
    """The full paths that `targets` mean in `model`, sorted.

    Args:
        targets: a preset (`language`, `language+audio`) or names. A name is a full path, or the end of one: `q_proj`
            and `self_attn.q_proj` mean the text decoder's, `audio_tower.q_proj` the audio tower's.

    Raises:
        UserError: a name that no module has.
    """
    if isinstance(targets, str):
        targets = PRESETS.get(targets, (targets,))
    paths = linear_modules(model)
    chosen: set[str] = set()
    for name in targets:
        part, end = ("audio_tower.", name[12:]) if name.startswith("audio_tower.") else ("language_model.layers.", name)
        hits = {name} & paths.keys() or {p for p in paths if p.startswith(part) and p.endswith(f".{end}")}
        if not hits:
            raise UserError(_no_target(model, name, paths))
        chosen |= hits
    return tuple(sorted(chosen))


def _no_target(model: nn.Module, name: str, paths: dict[str, nn.Module]) -> str:
    if name.startswith("vision_tower"):
        return f"target module {name}: the vision tower is carried along but not trained here"
    if "embed_tokens" in name or "lm_head" in name:
        return f"target module {name}: an embedding, not a linear map; name linear modules"
    if ".self_attn." in name and name.endswith(("k_proj", "v_proj")):
        return f"target module {name}: that layer shares the keys and values of another one and has none of its own"
    if name.startswith("audio_tower.") and not any(p.startswith("audio_tower.") for p in paths):
        return f"target module {name}: this checkpoint has no audio tower; it takes text only"
    known = sorted({p.rpartition(".")[2] for p in paths if ".layers." in p})
    audio = sorted({p.rpartition(".")[2] for p in paths if p.startswith("audio_tower.")})
    if name.startswith("audio_tower."):
        known = [f"audio_tower.{end}" for end in audio]
    return f"target module {name}: no linear module of that name; there are {', '.join(known) or 'none'}"


def attach(model: nn.Module, config: AdapterConfig) -> nn.Module:
    """Freezes `model` and puts a fresh adapter (A random, B zero, float32) on each of `config.target_modules`.

    Raises:
        UserError: a path that is no linear module of the model, or that has an adapter already.
    """
    modules = linear_modules(model)
    adapters = []
    for path in config.target_modules:
        base = modules.get(path)
        if base is None:
            raise UserError(_no_target(model, path, modules))
        if isinstance(base, LoRALinear):
            raise UserError(f"target module {path} has an adapter already")
        adapters.append((path, LoRALinear.from_base(base, config.rank(path), config.lora_dropout, config.scale(path))))
    model.freeze()
    model.update_modules(tree_unflatten(adapters))
    return model


def detach(model: nn.Module) -> nn.Module:
    """Takes every adapter off again; the base weights are as they were."""
    bases = [(path, m.linear) for path, m in linear_modules(model).items() if isinstance(m, LoRALinear)]
    model.update_modules(tree_unflatten(bases))
    return model


def adapter_weights(model: nn.Module) -> dict[str, mx.array]:
    """`<path>.lora_a` `[in, r]` and `<path>.lora_b` `[r, out]` of every adapter."""
    weights = {}
    for path, module in linear_modules(model).items():
        if isinstance(module, LoRALinear):
            weights |= {f"{path}.lora_a": module.lora_a, f"{path}.lora_b": module.lora_b}
    return weights


def expected_adapter_shapes(model: nn.Module, config: AdapterConfig) -> dict[str, tuple[int, int]]:
    """The shape of every tensor that an adapter of `config` has on `model`, attached or not."""
    modules, shapes = linear_modules(model), {}
    for path in config.target_modules:
        base = modules.get(path)
        if base is None:
            raise UserError(_no_target(model, path, modules))
        base = base.linear if isinstance(base, LoRALinear) else base
        out_size, in_size = base.weight.shape
        if isinstance(base, nn.QuantizedLinear):
            in_size = in_size * 32 // base.bits
        shapes[f"{path}.lora_a"] = (in_size, config.rank(path))
        shapes[f"{path}.lora_b"] = (config.rank(path), out_size)
    return shapes


def load_weights(model: nn.Module, config: AdapterConfig, weights: dict[str, mx.array], source: str | Path) -> None:
    """Puts `weights` into the adapters attached to `model`, in float32.

    Raises:
        UserError: naming the tensors of `source` that are missing, unexpected or of another shape.
    """
    expected = expected_adapter_shapes(model, config)
    wrong = [f"{n} is missing" for n in expected.keys() - weights.keys()]
    wrong += [f"{n} is unexpected" for n in weights.keys() - expected.keys()]
    wrong += [
        f"{n} is {list(weights[n].shape)}, the model needs {list(expected[n])}"
        for n in expected.keys() & weights.keys()
        if tuple(weights[n].shape) != expected[n]
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(f"{source}: does not fit this model: {'; '.join(sorted(wrong)[:3])}{more}")
    model.update(tree_unflatten([(name, w.astype(mx.float32)) for name, w in weights.items()]))


def find_adapter(folder: str | Path) -> Path:
    """The adapter folder: `folder` itself, or `folder`/adapter where it is a run."""
    folder = Path(folder)
    return folder / "adapter" if (folder / "adapter" / CONFIG).exists() else folder


def read_adapter(folder: str | Path) -> tuple[AdapterConfig, dict[str, mx.array]]:
    """Reads an adapter folder of ours, or the one of a run.

    Raises:
        UserError: no adapter there, another format (PEFT's is named), or unreadable files.
    """
    folder = find_adapter(folder)
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; is {folder} an adapter or a run folder?") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise UserError(f"{path}: cannot be read as JSON ({e})") from None
    if isinstance(values, dict) and "peft_type" in values:
        raise UserError(
            f"{path}: a PEFT adapter; convert it first: "
            f"python -m convert.adapter from-hf --adapter {folder} --output DIR"
        )
    config = _config_from_dict(values, path)
    try:
        weights = mx.load(str(folder / WEIGHTS))
    except Exception as e:  # mlx raises RuntimeError, ValueError or OSError by the kind of damage
        raise UserError(f"{folder / WEIGHTS}: cannot be read ({str(e).strip()})") from None
    return config, weights


def _config_from_dict(values: Any, path: Path) -> AdapterConfig:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UserError(f'{path}: not an adapter of mlx-gemma3n (no "format": "{FORMAT}")')
    if values.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{path}: format_version {values.get('format_version')!r}; this version reads {FORMAT_VERSION}")
    known = {k: v for k, v in values.items() if k in AdapterConfig.__dataclass_fields__}
    try:
        return AdapterConfig(**known)
    except (TypeError, ValueError, UserError) as e:
        raise UserError(f"{path}: {e}") from None


def save_adapter(folder: str | Path, config: AdapterConfig, weights: dict[str, mx.array], replace: bool = True) -> None:
    """Writes an adapter folder aside and moves it into place, so that `folder` is the old one or the new one, whole.

    Raises:
        UserError: `folder` exists and is not to be replaced, or the disk is full.
    """
    with write_aside(folder, replace) as aside:
        try:
            mx.save_safetensors(str(aside / WEIGHTS), weights, metadata={"format": "mlx"})
        except RuntimeError as e:  # of MLX, where a file does not take all that is written to it
            raise UserError(f"{folder}: the adapter cannot be written ({str(e).strip()}); make room") from None
        values = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(config)}
        (aside / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
