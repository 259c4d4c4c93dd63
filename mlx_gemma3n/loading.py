"""Checkpoint folders and Hub ids into models: Hugging Face's own files, ours, and those of mlx-lm and mlx-vlm.

Tensors are read lazily and a folder is checked against the model before anything is computed: what is missing,
unexpected or wrongly shaped is named. The per-layer table is never read whole: it stays in its file (`mapped.py`).
"""

import json
import re
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_gemma3n import lora
from mlx_gemma3n.config import Config, UserError
from mlx_gemma3n.files import stored_tensors
from mlx_gemma3n.mapped import MappedEmbedding
from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.names import VISION_TOWER, is_dead, to_mlx, transposition
from mlx_gemma3n.processor import Processor

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PER_LAYER_TABLE = "language_model.embed_tokens_per_layer."


def default_dtype() -> mx.Dtype:
    """bfloat16 on Metal; float32 on the CPU, whose half-precision matrix products are ten times slower."""
    return mx.bfloat16 if mx.default_device() == mx.Device(mx.gpu) else mx.float32


def find_checkpoint(path: str | Path) -> Path:
    """The folder of a checkpoint: `path` itself, or a Hub id's files, downloaded where they are not cached.

    Raises:
        UserError: no such folder, and no such repository or no way to reach it.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists() or not HUB_ID.fullmatch(str(path)):
        raise UserError(f"{path}: no such checkpoint folder, and not a Hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"])
        )
    except Exception as e:  # the Hub's client raises OSErrors, ValueErrors and httpx's own by turns
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise UserError(f"{path}: no such folder here, and the Hub does not give it ({reason})") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, by its index where it has one.

    Raises:
        UserError: none, or one that the index names is not there.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as e:
            raise UserError(f"{index}: not an index of safetensors files ({e})") from None
        files = [folder / name for name in names]
        if lost := [f.name for f in files if not f.exists()]:
            raise UserError(f"{folder}: {', '.join(lost[:3])}: named in {index.name} but not there; fetch it again")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no .safetensors files; is it a checkpoint folder?")
    return files


def read_tensors(folder: Path, config: Config) -> Iterator[tuple[str, mx.array]]:
    """Every tensor that the model reads, lazily, under our name and in our layout; the vision tower's are left out."""
    for file in weight_files(folder):
        try:
            tensors, metadata = mx.load(str(file), return_metadata=True)
        except Exception as e:  # mlx raises RuntimeError, ValueError or OSError by the kind of damage
            raise UserError(f"{file}: cannot be read as safetensors ({str(e).strip()}); fetch it again") from None
        for name, tensor in tensors.items():
            path = to_mlx(name)
            if path is None or path.startswith(VISION_TOWER) or is_dead(path, config.text_config):
                continue
            axes = transposition(path)
            # Files of MLX's say so in their metadata, and hold convolutions channels last already.
            if axes and metadata.get("format") != "mlx":
                tensor = tensor.transpose(axes)
            yield path, tensor


def quantize(model: Gemma3n, quantization: dict[str, Any], chosen: Callable[[str, int], bool]) -> None:
    """Puts quantized modules in place, by config.json's defaults and its overrides by path.

    Args:
        quantization: of config.json.
        chosen: whether a module is quantized, from its path and the group size it would have.
    """
    defaults = {k: quantization[k] for k in ("group_size", "bits", "mode") if k in quantization}
    overrides = {to_mlx(k): v for k, v in quantization.items() if isinstance(v, dict)}

    def choose(path: str, module: nn.Module) -> Any:
        wanted = {**defaults, **overrides.get(path, {})}
        return wanted if hasattr(module, "to_quantized") and chosen(path, wanted["group_size"]) else False

    nn.quantize(model, class_predicate=choose)


def _check(folder: Path, owner: str, expected: dict[str, mx.array], found: dict[str, mx.array]) -> None:
    """Refuses the weights `found` in a folder unless `owner` expects just those."""
    wrong = [f"{n} is missing" for n in expected.keys() - found.keys()]
    wrong += [f"{n} is unexpected" for n in found.keys() - expected.keys()]
    wrong += [
        f"{n} is {list(found[n].shape)}, {owner} asks for {list(expected[n].shape)}"
        for n in expected.keys() & found.keys()
        if expected[n].shape != found[n].shape
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise UserError(f"{folder}: the weights do not fit {owner}: {'; '.join(sorted(wrong)[:5])}{more}")


def _mapped(folder: Path, table: nn.Embedding | nn.QuantizedEmbedding, dtype: mx.Dtype) -> MappedEmbedding:
    """What stands for `table` in the model: the same one, in the folder's files."""
    stored = {}
    for file in weight_files(folder):
        for tensor in stored_tensors(file):
            name = to_mlx(tensor.name) or ""
            if name.startswith(PER_LAYER_TABLE):
                stored[name.removeprefix(PER_LAYER_TABLE)] = tensor
    if isinstance(table, nn.QuantizedEmbedding):
        return MappedEmbedding(**stored, dtype=dtype, group_size=table.group_size, bits=table.bits, mode=table.mode)
    return MappedEmbedding(**stored, dtype=dtype)


def load_model(folder: str | Path, dtype: Optional[mx.Dtype] = None) -> Gemma3n:
    """The model in a checkpoint folder, in inference mode, its weights not yet read from disk.

    The per-layer table is a `MappedEmbedding` and no part of the model's parameters.

    Args:
        dtype: of all floating-point weights; None for `default_dtype()`.

    Raises:
        UserError: a file is unreadable, or tensors are missing, unexpected or wrongly shaped; they are named.
    """
    folder = Path(folder)
    config = Config.load(folder)
    tensors = dict(read_tensors(folder, config))
    model = Gemma3n(config)
    if config.quantization:
        quantize(model, config.quantization, lambda path, _: f"{path}.scales" in tensors)
    _check(folder, "config.json", dict(tree_flatten(model.parameters())), tensors)
    dtype = dtype or default_dtype()
    text = model.language_model
    text.embed_tokens_per_layer = _mapped(folder, text.embed_tokens_per_layer, dtype)
    floating = (mx.float16, mx.bfloat16, mx.float32)
    model.load_weights(
        [
            (name, tensor.astype(dtype) if tensor.dtype in floating else tensor)
            for name, tensor in tensors.items()
            if not name.startswith(PER_LAYER_TABLE)
        ]
    )
    return model.eval()


def release(model: Gemma3n, folder: str | Path, part: str = "audio_tower") -> None:
    """Gives back the memory of a part that is not needed for now; its next use reads the weights from disk again.

    They are then as they were when loaded, in the dtypes they have in `model`. Adapters stay, on the part too.

    Args:
        folder: that `model` was loaded from.
        part: a module of `model`.

    Raises:
        UserError: the folder's files are unreadable or hold other weights than those of `model`.
        ValueError: the model has no such part.
    """
    if part not in model:
        raise ValueError(f"the model has no {part}")
    folder = Path(folder)
    weights = tree_flatten({part: model[part].parameters()})
    held = {name: weight for name, weight in weights if not name.endswith((".lora_a", ".lora_b"))}
    # By the name in the folder, that in the model: an adapter keeps the map that it is on as its `linear`.
    names = {name.replace(".linear.", "."): name for name in held}
    tensors = {
        name: tensor
        for name, tensor in read_tensors(folder, model.config)
        if name.startswith(f"{part}.") and not name.startswith(PER_LAYER_TABLE)
    }
    _check(folder, "the model", {stored: held[name] for stored, name in names.items()}, tensors)
    model.update(tree_unflatten([(names[n], tensor.astype(held[names[n]].dtype)) for n, tensor in tensors.items()]))
    del weights, held
    mx.clear_cache()


def load(
    path: str | Path, adapter: Optional[str | Path] = None, dtype: Optional[mx.Dtype] = None
) -> tuple[Gemma3n, Processor]:
    """A model and its processor.

    Args:
        path: a Hugging Face checkpoint folder, an MLX one (ours, mlx-lm's, mlx-vlm's), or a Hub id.
        adapter: an adapter or run folder of ours, attached to the model.
        dtype: of the weights; None for bfloat16 on Metal and float32 on the CPU.

    Raises:
        UserError: something of it cannot be read or does not fit; the message names the file.
    """
    folder = find_checkpoint(path)
    model = load_model(folder, dtype)
    if adapter is not None:
        config, weights = lora.read_adapter(adapter)
        lora.attach(model, config)
        lora.load_weights(model, config, weights, lora.find_adapter(adapter) / lora.WEIGHTS)
    return model.eval(), Processor.from_pretrained(folder)
