"""Adapters between our format and PEFT's: `python -m convert.adapter to-hf|from-hf`.

The numbers are the same, transposed: `lora_a` `[in, r]` is PEFT's `lora_A.weight` `[r, in]`, `lora_b` `[r, out]` its
`lora_B.weight` `[out, r]`, and neither is rounded on the way, so a round trip gives the bits back. PEFT finds its
modules by the end of their names, where `q_proj` would hit the audio tower's too; exported configs name full paths,
those of `Gemma3nForConditionalGeneration`, or of `Gemma3nForCausalLM` where the adapter is for one.
"""

import filecmp
import json
import re
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Mapping, Optional

import click
import mlx.core as mx
import mlx.nn as nn
import yaml

from mlx_gemma3n import lora
from mlx_gemma3n.config import Config, UserError
from mlx_gemma3n.files import refuse_existing, stored_tensors, write_aside, write_text
from mlx_gemma3n.loading import HUB_ID
from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.names import VISION_TOWER, to_mlx
from mlx_gemma3n.names import to_hf as hf_name

WEIGHTS, CONFIG, PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
HALVES = {"lora_a": "lora_A", "lora_b": "lora_B"}
# Beside our own fields in adapter_config.json: the adapter came from a Gemma3nForCausalLM and goes back to one.
TEXT_ONLY = "peft_text_only"

# Fields of a LoraConfig that make of the adapter more than x @ A @ B, and what they stand for.
REFUSED = {
    "use_dora": "DoRA's magnitudes",
    "modules_to_save": "whole modules saved beside the adapter",
    "lora_bias": "biases in the adapter",
    "trainable_token_indices": "trained rows of an embedding",
    "target_parameters": "adapters on bare parameters",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "adapters switched on by tokens (aLoRA)",
    "use_qalora": "QALoRA's pooled inputs",
    "arrow_config": "Arrow's routing",
    "use_bdlora": "BD-LoRA's block-diagonal matrices",
    "kasa_config": "KaSA's truncated base weights and singular values",
    "velora_config": "VeLoRA's compressed activations",
    "monteclora_config": "MonteCLoRA's sampling",
}
# All other fields that PEFT has as of 0.21: read here, or without a say in what the adapter computes. Which modules
# have one is read off the tensors.
READ = {
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "rank_pattern"),
    *("alpha_pattern", "init_lora_weights"),
}
IDLE = {
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "target_modules", "exclude_modules"),
    # PEFT itself sets fan_in_fan_out to false on linear modules.
    *("fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_config", "megatron_core", "loftq_config"),
    *("eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
}
# Initialisations that leave the base weights alone. The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract the
# adapter's start from them, and on the untouched base such an adapter is wrong.
STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class Conversion:
    """What came of a conversion.

    Attributes:
        dropped: modules whose adapters were left out, which nothing reads here and which add nothing.
    """

    folder: Path
    modules: int
    target: str
    dropped: tuple[str, ...] = ()

    def __str__(self) -> str:
        line = f"{self.folder}: {self.target} adapter of {self.modules} modules"
        if self.dropped:
            line += f"\nleft out, as they are zero and nothing here reads them: {_few(self.dropped)}"
        return line


def _few(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read_json(path: Path, kind: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; is {path.parent} {kind}?") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise UserError(f"{path}: cannot be read as JSON ({e})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {type(values).__name__}, not an object")
    return values


def _refuse(values: dict[str, Any], path: Path) -> None:
    if values.get("format") == lora.FORMAT:
        raise UserError(f"{path}: is in our format already; from-hf reads PEFT's")
    if values.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {values.get('peft_type')!r}; only LORA can be read")
    for name, meaning in REFUSED.items():
        if values.get(name):
            raise UserError(f"{path}: {name} is {json.dumps(values[name])}; {meaning} cannot be represented here")
    if values.get("bias", "none") != "none":
        raise UserError(f"{path}: bias is {values['bias']!r}; trained biases cannot be represented here")
    start = values.get("init_lora_weights")
    if (start.lower() if isinstance(start, str) else start) not in STARTS:
        raise UserError(
            f"{path}: init_lora_weights is {start!r}, which changes the base weights; the adapter alone cannot be "
            "represented here (PEFT turns some into plain LoRA: path_initial_model_for_weight_conversion)"
        )
    if unknown := [name for name, value in values.items() if value and name not in READ | IDLE | REFUSED.keys()]:
        raise UserError(
            f"{path}: {unknown[0]} is {json.dumps(values[unknown[0]])}; it is not known here what it changes"
        )


def _check_numbers(values: dict[str, Any], path: Path) -> None:
    """The numbers that are computed with; r and alpha of every pattern too."""
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(values.get(name) or {}, dict):
            raise UserError(f"{path}: {name} is {json.dumps(values[name])}, not an object")
    for name, kind in (("r", int), ("lora_alpha", Real), ("lora_dropout", Real)):
        patterns = values.get({"r": "rank_pattern", "lora_alpha": "alpha_pattern"}.get(name, "")) or {}
        for value in (values.get(name, 0), *patterns.values()):
            if isinstance(value, bool) or not isinstance(value, kind):
                raise UserError(f"{path}: {name} {json.dumps(value)} is not a {'whole ' if kind is int else ''}number")


def _pattern(patterns: Optional[dict[str, Any]], name: str, default: Any, path: Path) -> Any:
    """The value of the first pattern that the end of a module's name matches, as PEFT's `get_pattern_key` does it."""
    for pattern, value in (patterns or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        except re.error as e:
            raise UserError(f"{path}: pattern {pattern!r} is no regular expression ({e})") from None
    return default


def _read_tensors(path: Path) -> dict[str, mx.array]:
    """Of a safetensors file, in their own dtype."""
    for tensor in stored_tensors(path):
        if tensor.dtype not in ("F32", "F16", "BF16"):
            raise UserError(f"{path}: {tensor.name} is {tensor.dtype}, not float32, float16 or bfloat16")
    try:
        tensors = mx.load(str(path))
        mx.eval(tensors)
    except Exception as e:  # mlx raises RuntimeError, ValueError or OSError by the kind of damage
        raise UserError(f"{path}: cannot be read as safetensors ({str(e).strip()})") from None
    return tensors


def _pairs(tensors: dict[str, mx.array], path: Path) -> dict[str, dict[str, mx.array]]:
    """PEFT's tensors by module: `{name: {"A": [r, in], "B": [out, r]}}`."""
    pairs: dict[str, dict[str, mx.array]] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])(?:\.default)?\.weight", key)
        if not match:
            what = "an adapter of an embedding" if "lora_embedding" in key else "no LoRA matrix of a linear module"
            raise UserError(f"{path}: {key}: {what}; cannot be represented here")
        if match[2] in pairs.setdefault(match[1], {}):
            raise UserError(f"{path}: {key} is there twice")
        pairs[match[1]][match[2]] = tensor
    for name, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise UserError(f"{path}: {name} has lora_{next(iter(pair))} alone; the file is not whole")
        a, b = pair["A"].shape, pair["B"].shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise UserError(f"{path}: {name}: lora_A {list(a)} and lora_B {list(b)} do not belong together")
    return pairs


def _is_dead(module: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether `module` is a KV-shared layer's key or value projection, which transformers once had and never read."""
    layer, _, end = module.rpartition(".")
    return module not in modules and end in ("k_proj", "v_proj") and f"{layer}.q_proj" in modules


def _place(
    pairs: dict[str, dict[str, mx.array]], modules: Optional[Mapping[str, nn.Module]], path: Path
) -> tuple[dict[str, str], list[str]]:
    """Our module of each of PEFT's names, and the names that add nothing and have none here."""
    places: dict[str, str] = {}
    dropped, lost = [], []
    for name, pair in pairs.items():
        module = to_mlx(name)
        if module is None:
            raise UserError(
                f"{path}: {name}: the output table is the token table, no linear map; it takes no adapter here"
            )
        reason = None
        if module.startswith(VISION_TOWER):
            reason = "the vision tower takes no adapter here; train with exclude_modules"
        elif modules is not None and _is_dead(module, modules):
            reason = "that layer shares the keys and values of another one and has none of its own"
        if reason is not None:
            if mx.any(pair["B"]).item():
                raise UserError(f"{path}: {name}: {reason}")
            dropped.append(name)
        elif module in places.values():
            raise UserError(f"{path}: {name} is there twice, under another name")
        else:
            places[name] = module
            if modules is not None and module not in modules:
                lost.append(name)
    if lost:
        raise UserError(f"{path}: the model has no linear module {_few(lost)}; is the adapter for another base?")
    if not places:
        raise UserError(f"{path}: has no adapter tensors")
    return places, dropped


def _read(
    folder: Path, modules: Optional[Mapping[str, nn.Module]]
) -> tuple[lora.AdapterConfig, dict[str, mx.array], list[str], bool]:
    """`read_peft`, what it left out, and whether the names are those of a Gemma3nForCausalLM."""
    config_path, path = folder / CONFIG, folder / WEIGHTS
    values = _read_json(config_path, "a PEFT adapter")
    _refuse(values, config_path)
    _check_numbers(values, config_path)
    if not path.exists():
        other = " (adapter_model.bin is not read; save the adapter with safe_serialization=True)"
        raise UserError(f"{path}: no such file{other if (folder / 'adapter_model.bin').exists() else ''}")
    pairs = _pairs(_read_tensors(path), path)
    places, dropped = _place(pairs, modules, path)
    weights, ranks, alphas = {}, {}, {}
    r, alpha = values.get("r", 8), values.get("lora_alpha", 8)
    for name, module in places.items():
        a, b = pairs[name]["A"], pairs[name]["B"]
        ranks[module], wanted = a.shape[0], _pattern(values.get("rank_pattern"), name, r, config_path)
        alphas[module] = _pattern(values.get("alpha_pattern"), name, alpha, config_path)
        if ranks[module] != wanted:
            raise UserError(f"{path}: {name} has rank {ranks[module]}, {CONFIG} says {wanted}")
        weights |= {f"{module}.lora_a": mx.contiguous(a.T), f"{module}.lora_b": mx.contiguous(b.T)}
    try:
        config = lora.AdapterConfig(
            tuple(ranks),
            r=r,
            lora_alpha=float(alpha),
            lora_dropout=float(values.get("lora_dropout", 0.0)),
            use_rslora=bool(values.get("use_rslora")),
            rank_pattern={m: rank for m, rank in sorted(ranks.items()) if rank != r},
            alpha_pattern={m: float(a) for m, a in sorted(alphas.items()) if a != alpha},
            base_model_name_or_path=str(values.get("base_model_name_or_path") or ""),
        )
    except UserError as e:
        raise UserError(f"{config_path}: {e}") from None
    return config, weights, dropped, all(hf_name(module, text_only=True) == name for name, module in places.items())


def read_peft(
    folder: str | Path, modules: Optional[Mapping[str, nn.Module]] = None
) -> tuple[lora.AdapterConfig, dict[str, mx.array]]:
    """A PEFT adapter in our names and layout, its tensors in their own dtype.

    What has adapters is read off the tensors, so lists, regular expressions and `all-linear` are all the same. Adapters
    that are zero are left out where nothing here could read them: the vision tower's, and those of key and value
    projections that KV-shared layers do not have.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        modules: `lora.linear_modules` of the model it is for, to name those that it lacks.

    Raises:
        UserError: it cannot be read, or is more than LoRA on linear modules; the message names what.
    """
    return _read(Path(folder), modules)[:2]


def from_hf(adapter: str | Path, output: str | Path, base: Optional[str | Path] = None) -> Conversion:
    """Writes a PEFT adapter folder in our format.

    Args:
        base: a checkpoint folder, Hugging Face's or MLX's; the adapter is held against its config.

    Raises:
        UserError: as `read_peft`, the adapter does not fit `base`, or `output` exists.
    """
    refuse_existing(output)
    model = None if base is None else Gemma3n(Config.load(base))
    modules = None if model is None else lora.linear_modules(model)
    config, weights, dropped, text_only = _read(Path(adapter), modules)
    if model is not None:
        for name, shape in lora.expected_adapter_shapes(model, config).items():
            if weights[name].shape != shape:
                path, _, half = name.rpartition(".")
                found, wanted = list(weights[name].shape)[::-1], list(shape)[::-1]
                raise UserError(
                    f"{Path(adapter) / WEIGHTS}: {HALVES[half]} of {hf_name(path, text_only)} is {found}, {base} needs "
                    f"{wanted}; is the adapter for another base?"
                )
    lora.save_adapter(output, config, weights, replace=False)
    if text_only:
        path = Path(output) / lora.CONFIG
        write_text(path, json.dumps({**_read_json(path, "an adapter"), TEXT_ONLY: True}, indent=2) + "\n")
    return Conversion(Path(output), len(config.target_modules), "mlx-gemma3n", tuple(dropped))


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def peft_config(config: lora.AdapterConfig, text_only: bool = False) -> dict[str, Any]:
    """PEFT's adapter_config.json: full paths, and patterns that match them alone."""
    name = {path: hf_name(path, text_only) for path in config.target_modules}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base_model_name_or_path or None,
        "r": config.r,
        "lora_alpha": _whole(config.lora_alpha),
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "bias": "none",
        "inference_mode": True,
        "target_modules": list(name.values()),
        "rank_pattern": {re.escape(name[p]): rank for p, rank in config.rank_pattern.items() if p in name},
        "alpha_pattern": {re.escape(name[p]): _whole(alpha) for p, alpha in config.alpha_pattern.items() if p in name},
    }


def _is_text_only(folder: Path, config: lora.AdapterConfig) -> bool:
    """Whether the adapter is for a Gemma3nForCausalLM: it came from one, or its base is here and is one."""
    if not all(path.startswith("language_model.") for path in config.target_modules):
        return False
    if _read_json(folder / lora.CONFIG, "an adapter").get(TEXT_ONLY):
        return True
    base = Path(config.base_model_name_or_path or "no base") / "config.json"
    return base.exists() and _read_json(base, "a checkpoint").get("model_type") == "gemma3n_text"


def to_hf(adapter: str | Path, output: str | Path) -> Conversion:
    """Writes an adapter or run folder of ours as a PEFT adapter, with a model card.

    Raises:
        UserError: `adapter` cannot be read, or `output` exists.
    """
    refuse_existing(output)
    folder = lora.find_adapter(adapter)
    config, _ = lora.read_adapter(adapter)
    path = folder / lora.WEIGHTS
    weights = _read_tensors(path)
    text_only = _is_text_only(folder, config)
    tensors = {}
    for name, tensor in weights.items():
        module, _, half = name.rpartition(".")
        if half not in HALVES or module not in config.target_modules or tensor.ndim != 2:
            raise UserError(f"{path}: {name} is unexpected")
        if tensor.shape[1 if half == "lora_a" else 0] != config.rank(module):
            raise UserError(f"{path}: {name} is {list(tensor.shape)}, {lora.CONFIG} says rank {config.rank(module)}")
        tensors[f"{PREFIX}{hf_name(module, text_only)}.{HALVES[half]}.weight"] = mx.contiguous(tensor.T)
    if lost := [f"{m}.{half}" for m in config.target_modules for half in HALVES if f"{m}.{half}" not in weights]:
        raise UserError(f"{path}: {_few(lost)} missing; {lora.CONFIG} names the module")
    with write_aside(output) as aside:
        mx.save_safetensors(str(aside / WEIGHTS), tensors, metadata={"format": "pt"})
        write_text(aside / CONFIG, json.dumps(peft_config(config, text_only), indent=2) + "\n")
        write_text(aside / "README.md", model_card(config, *_run_folder(folder), text_only))
    return Conversion(Path(output), len(config.target_modules), "PEFT")


def _run_folder(folder: Path) -> tuple[Optional[Path], Optional[int]]:
    """The run that an adapter folder belongs to, and the adapter's step, None where no checkpoint tells it."""
    folder = folder.resolve()
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    if folder.name != "adapter" and run == folder.parent:
        return None, None
    steps = {int(p.name[5:]): p for p in run.glob("checkpoints/step-*") if p.name[5:].isdecimal()}
    # A run that was killed has measured more than it saved.
    for step, checkpoint in sorted(steps.items(), reverse=True):
        mine, theirs = folder / lora.WEIGHTS, checkpoint / lora.WEIGHTS
        if checkpoint == folder or theirs.exists() and filecmp.cmp(mine, theirs, shallow=False):
            return run, step
    return run, None


def _rows(run: Path, last: Optional[int]) -> list[dict[str, Any]]:
    """What metrics.jsonl says up to step `last`; a line that a killed run left half written says nothing."""
    path = run / "metrics.jsonl"
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and (last is None or row["step"] <= last):
            rows.append(row)
    return rows


def _data_line(run: Path) -> list[str]:
    counts = _read_json(run / "data.json", "a run") if (run / "data.json").exists() else {}
    texts = {"train_examples": "{} training examples", "valid_examples": "{} validation examples", "clips": "{} clips"}
    found = [text.format(counts[name]) for name, text in texts.items() if isinstance(counts.get(name), int)]
    return [f"- Data: {', '.join(found)}"] if found else []


def _settings_line(run: Path) -> list[str]:
    path = run / "config.yaml"
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (UnicodeDecodeError, yaml.YAMLError) as e:
        raise UserError(f"{path}: cannot be read as YAML ({' '.join(str(e).split())})") from None
    names = ("optimizer", "learning_rate", "batch_size", "gradient_accumulation_steps", "weight_decay", "seed")
    found = [f"{n} {settings[n]}" for n in names if isinstance(settings, dict) and settings.get(n) is not None]
    return [f"- Settings: {', '.join(found)}"] if found else []


def _measure_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The first and the last value of each measure, with their steps."""
    names = {"loss": "training loss", "valid_loss": "validation loss", "valid_exact_match": "validation exact match"}
    lines = []
    for name, text in names.items():
        found = [row for row in rows if isinstance(row.get(name), (int, float))]
        if found:
            cells = [f"{row[name]:.4f} (step {row['step']})" for row in (found[0], found[-1])]
            lines.append(f"| {text} | {' | '.join(cells)} |")
    return ["", "| measure | first | last |", "|---|---|---|", *lines] if lines else []


def model_card(config: lora.AdapterConfig, run: Optional[Path], last: Optional[int], text_only: bool = False) -> str:
    """README.md for the Hub: what it is for, how it was made, what was measured. Only what the run folder says.

    Args:
        last: the adapter's step, where the run may have gone on after it.
    """
    base = config.base_model_name_or_path
    known = base if HUB_ID.fullmatch(base) and not Path(base).exists() else None
    front: dict[str, Any] = {"library_name": "peft", "tags": ["lora", "gemma3n", "mlx-gemma3n"]}
    if known:
        front = {"base_model": known, **front}
    parts: dict[str, list[str]] = {}
    for path in config.target_modules:
        parts.setdefault(path.split(".")[0], []).append(path.rpartition(".")[2])
    lines = ["---", yaml.safe_dump(front, sort_keys=False).strip(), "---", "", "# LoRA adapter for Gemma 3n", ""]
    rank = f"- Rank {config.r}, alpha {_whole(config.lora_alpha):g}{', rsLoRA' if config.use_rslora else ''}"
    others = len(config.rank_pattern.keys() | config.alpha_pattern.keys())
    lines += [f"- Base model: {base or 'not recorded'}", rank + (f"; {others} modules differ" if others else "")]
    lines += [f"- {len(ends)} modules of {part}: {', '.join(sorted(set(ends)))}" for part, ends in parts.items()]
    if run is not None:
        rows = _rows(run, last)
        steps = [f"- {rows[-1]['step']} steps" + _epochs(rows)] if rows else []
        lines += [*_data_line(run), *_settings_line(run), *steps, *_measure_lines(rows)]
    kind = "Gemma3nForCausalLM" if text_only else "Gemma3nForConditionalGeneration"
    load = [
        "",
        "```python",
        "from peft import PeftModel",
        f"from transformers import {kind}",
        "",
        f'model = {kind}.from_pretrained("{known or "BASE"}")',
        'model = PeftModel.from_pretrained(model, "THIS_REPOSITORY")',
        "```",
    ]
    return "\n".join([*lines, *load]) + "\n"


def _epochs(rows: list[dict[str, Any]]) -> str:
    epochs = [row["epoch"] for row in rows if isinstance(row.get("epoch"), (int, float))]
    return f", {epochs[-1]:g} epochs" if epochs else ""


def push(folder: str | Path, repo: str) -> str:
    """Uploads an exported folder to the Hub, which the environment's HF_TOKEN or `hf auth login` opens.

    Returns:
        The address of the repository.

    Raises:
        UserError: the Hub refuses or cannot be reached; the folder is there all the same.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message="LoRA adapter for Gemma 3n")
    except Exception as e:  # the Hub's client raises OSErrors, ValueErrors and httpx's own by turns
        reason = " ".join(str(e).split()) or type(e).__name__
        raise UserError(
            f"{repo}: not uploaded ({reason}); {folder} is whole, try again with: hf upload {repo} {folder}"
        ) from None
    return str(address)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Convert LoRA adapters to PEFT's format and back."""


@main.command("to-hf")
@click.option("--adapter", required=True, type=click.Path(), help="Adapter or run folder of ours.")
@click.option("--output", required=True, type=click.Path(), help="Folder to write; must not exist or be empty.")
@click.option("--push-to-hub", "repo", metavar="REPO", help="Upload it to this repository (owner/name) of the Hub.")
def to_hf_command(adapter: str, output: str, repo: Optional[str]) -> None:
    """Write an adapter for PEFT, with a model card."""
    if repo is not None and not HUB_ID.fullmatch(repo):
        raise UserError(f"--push-to-hub {repo}: want owner/name")
    click.echo(to_hf(adapter, output))
    if repo is not None:
        click.echo(push(output, repo))


@main.command("from-hf")
@click.option("--adapter", required=True, type=click.Path(), help="PEFT adapter folder.")
@click.option("--output", required=True, type=click.Path(), help="Folder to write; must not exist or be empty.")
@click.option("--base", type=click.Path(), help="Checkpoint folder that the adapter is held against.")
def from_hf_command(adapter: str, output: str, base: Optional[str]) -> None:
    """Read an adapter that PEFT made."""
    click.echo(from_hf(adapter, output, base))


if __name__ == "__main__":
    from mlx_gemma3n.cli import run

    run(main)
