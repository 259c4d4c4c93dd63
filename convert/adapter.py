"""Adapters between our format and PEFT's: `python -m convert.adapter to-hf|from-hf`.

The numbers are the same, transposed: `lora_a` `[in, r]` is PEFT's `lora_A.weight` `[r, in]`, `lora_b` `[r, out]` its
`lora_B.weight` `[out, r]`, and neither is rounded on the way, so a round trip gives the bits back. PEFT finds its modules
by the end of their names, where `q_proj` would hit the audio tower's too; exported configs name full paths, those of
`Gemma3nForConditionalGeneration`.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Optional

import click
import mlx.core as mx
import yaml

from mlx_gemma3n import lora
from mlx_gemma3n.config import UserError
from mlx_gemma3n.files import write_aside
from mlx_gemma3n.loading import HUB_ID
from mlx_gemma3n.names import VISION_TOWER, to_hf as hf_name, to_mlx

WEIGHTS, CONFIG, PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
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
    "arrow_config": "Arrow routing",
    "fan_in_fan_out": "transposed base weights",
}
# Initialisations that subtract the adapter's start from the base weights: on the untouched base it would be wrong.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True)
class Conversion:
    folder: Path
    modules: int
    target: str

    def __str__(self) -> str:
        return f"{self.folder}: {self.target} adapter of {self.modules} modules"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; is {path.parent} a PEFT adapter?") from None
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
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise UserError(
            f"{path}: init_lora_weights is {start!r}, which changed the base weights; save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion first"
        )


def _pattern(patterns: Optional[dict[str, Any]], name: str, default: Any) -> Any:
    """The value of the first pattern that the end of a module's name matches, as PEFT's `get_pattern_key` does it."""
    for pattern, value in (patterns or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        except re.error as e:
            raise UserError(f"pattern {pattern!r} is no regular expression ({e})") from None
    return default


def _pairs(tensors: dict[str, mx.array], path: Path) -> dict[str, dict[str, mx.array]]:
    """PEFT's tensors by module: `{name: {"A": [r, in], "B": [out, r]}}`."""
    pairs: dict[str, dict[str, mx.array]] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])(?:\.default)?\.weight", key)
        if not match:
            what = "an adapter of an embedding" if "lora_embedding" in key else "no LoRA matrix of a linear module"
            raise UserError(f"{path}: {key}: {what}; cannot be represented here")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    for name, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise UserError(f"{path}: {name} has lora_{next(iter(pair))} alone; the file is not whole")
        a, b = pair["A"].shape, pair["B"].shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise UserError(f"{path}: {name}: lora_A {list(a)} and lora_B {list(b)} do not belong together")
        if (to_mlx(name) or "").startswith(VISION_TOWER):
            raise UserError(f"{path}: {name}: the vision tower takes no adapters here; train with exclude_modules")
    if not pairs:
        raise UserError(f"{path}: has no adapter tensors")
    return pairs


def read_peft(
    folder: str | Path, modules: Optional[Iterable[str]] = None
) -> tuple[lora.AdapterConfig, dict[str, mx.array]]:
    """A PEFT adapter in our names and layout, its tensors in their own dtype.

    What has adapters is read off the tensors, so lists, regular expressions and `all-linear` are all the same.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        modules: the linear modules of the model it is for, to name those that it lacks.

    Raises:
        UserError: it cannot be read, or is more than LoRA on linear modules; the message names what.
    """
    folder = Path(folder)
    values, path = _read_json(folder / CONFIG), folder / WEIGHTS
    _refuse(values, folder / CONFIG)
    if not path.exists():
        other = " (only safetensors are read; save the adapter with safe_serialization=True)"
        raise UserError(f"{path}: no such file{other if (folder / 'adapter_model.bin').exists() else ''}")
    try:
        tensors = mx.load(str(path))
        mx.eval(tensors)
    except Exception as e:  # mlx raises RuntimeError, ValueError or OSError by the kind of damage
        raise UserError(f"{path}: cannot be read as safetensors ({str(e).strip()})") from None
    weights, ranks, alphas = {}, {}, {}
    r, alpha = values.get("r", 8), values.get("lora_alpha", 8)
    for name, pair in _pairs(tensors, path).items():
        module = to_mlx(name)
        ranks[module], wanted = pair["A"].shape[0], _pattern(values.get("rank_pattern"), name, r)
        alphas[module] = _pattern(values.get("alpha_pattern"), name, alpha)
        if ranks[module] != wanted:
            raise UserError(f"{path}: {name} has rank {ranks[module]}, {CONFIG} says {wanted}")
        weights[f"{module}.lora_a"] = mx.contiguous(pair["A"].T)
        weights[f"{module}.lora_b"] = mx.contiguous(pair["B"].T)
    if modules is not None and (lost := sorted(ranks.keys() - set(modules))):
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise UserError(f"{path}: the model has no linear module {', '.join(lost[:3])}{more}; is it for another base?")
    config = lora.AdapterConfig(
        tuple(ranks),
        r=r,
        lora_alpha=float(alpha),
        lora_dropout=float(values.get("lora_dropout") or 0.0),
        use_rslora=bool(values.get("use_rslora")),
        rank_pattern={m: rank for m, rank in sorted(ranks.items()) if rank != r},
        alpha_pattern={m: float(a) for m, a in sorted(alphas.items()) if a != alpha},
        base_model_name_or_path=values.get("base_model_name_or_path") or "",
    )
    return config, weights


def from_hf(adapter: str | Path, output: str | Path) -> Conversion:
    """Writes a PEFT adapter folder in our format; see `read_peft`."""
    config, weights = read_peft(adapter)
    lora.save_adapter(output, config, weights, replace=False)
    return Conversion(Path(output), len(config.target_modules), "mlx-gemma3n")


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def peft_config(config: lora.AdapterConfig) -> dict[str, Any]:
    """PEFT's adapter_config.json: full paths, and patterns that match them alone."""
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
        "target_modules": [hf_name(path) for path in config.target_modules],
        "rank_pattern": {re.escape(hf_name(path)): rank for path, rank in config.rank_pattern.items()},
        "alpha_pattern": {re.escape(hf_name(path)): _whole(alpha) for path, alpha in config.alpha_pattern.items()},
    }


def to_hf(adapter: str | Path, output: str | Path) -> Conversion:
    """Writes an adapter or run folder of ours as a PEFT adapter, with a model card.

    Raises:
        UserError: `adapter` cannot be read, or `output` exists.
    """
    config, weights = lora.read_adapter(adapter)
    halves = {"lora_a": "lora_A", "lora_b": "lora_B"}
    tensors = {}
    for name, tensor in weights.items():
        path, _, half = name.rpartition(".")
        if half not in halves or path not in config.target_modules or tensor.ndim != 2:
            raise UserError(f"{lora.find_adapter(adapter) / lora.WEIGHTS}: {name} is unexpected")
        tensors[f"{PREFIX}{hf_name(path)}.{halves[half]}.weight"] = mx.contiguous(tensor.T)
    if len(tensors) != 2 * len(config.target_modules):
        raise UserError(f"{lora.find_adapter(adapter) / lora.WEIGHTS}: tensors of some target_modules are missing")
    with write_aside(output) as aside:
        mx.save_safetensors(str(aside / WEIGHTS), tensors, metadata={"format": "pt"})
        (aside / CONFIG).write_text(json.dumps(peft_config(config), indent=2) + "\n", encoding="utf-8")
        (aside / "README.md").write_text(model_card(config, _run_folder(adapter)), encoding="utf-8")
    return Conversion(Path(output), len(config.target_modules), "PEFT")


def _run_folder(adapter: str | Path) -> Optional[Path]:
    for folder in (Path(adapter), Path(adapter).resolve().parent):
        if (folder / "metrics.jsonl").exists():
            return folder
    return None


def _metrics(run: Path) -> dict[str, Any]:
    """The newest value of each measure."""
    newest: dict[str, Any] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        newest |= json.loads(line)
    return newest


def model_card(config: lora.AdapterConfig, run: Optional[Path]) -> str:
    """README.md for the Hub: what it is for, how it was made, what was measured. Only what the run folder says."""
    base = config.base_model_name_or_path
    known = base if HUB_ID.fullmatch(base) and not Path(base).exists() else None
    front: dict[str, Any] = {"library_name": "peft", "tags": ["lora", "gemma3n", "mlx-gemma3n"]}
    if known:
        front = {"base_model": known, **front}
    kinds = sorted({path.rpartition(".")[2] for path in config.target_modules})
    lines = ["---", yaml.safe_dump(front, sort_keys=False).strip(), "---", "", "# LoRA adapter for Gemma 3n", ""]
    lines += [f"- Base model: {base or 'not recorded'}", f"- Rank {config.r}, alpha {_whole(config.lora_alpha)}"]
    lines += [f"- {len(config.target_modules)} modules: {', '.join(kinds)}"]
    if run is not None:
        if (run / "data.json").exists():
            counts = json.loads((run / "data.json").read_text(encoding="utf-8"))
            lines += [
                f"- Trained on {counts['train_examples']} examples, evaluated on {counts['valid_examples']}; "
                f"{counts['clips']} clips"
            ]
        metrics = _metrics(run)
        lines += [f"- {metrics['step']} steps, {metrics['epoch']:g} epochs"] if "epoch" in metrics else []
        names = {"loss": "training loss", "valid_loss": "validation loss", "valid_exact_match": "validation exact match"}
        found = {text: metrics[name] for name, text in names.items() if metrics.get(name) is not None}
        if found:
            lines += ["", "| measure | value |", "|---|---|", *[f"| {t} | {v:.4f} |" for t, v in found.items()]]
    load = [
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import Gemma3nForConditionalGeneration",
        "",
        f'model = Gemma3nForConditionalGeneration.from_pretrained("{known or "BASE"}")',
        'model = PeftModel.from_pretrained(model, "THIS_REPOSITORY")',
        "```",
    ]
    return "\n".join([*lines, *load]) + "\n"


def push(folder: str | Path, repo: str) -> str:
    """Uploads an exported folder to the Hub.

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
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise UserError(f"{repo}: not uploaded ({reason}); {folder} is whole, try again from there") from None
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
def from_hf_command(adapter: str, output: str) -> None:
    """Read an adapter that PEFT made."""
    click.echo(from_hf(adapter, output))


if __name__ == "__main__":
    from mlx_gemma3n.cli import run

    run(main)
