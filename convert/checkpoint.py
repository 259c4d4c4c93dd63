"""A Hugging Face checkpoint into an MLX one: `python -m convert.checkpoint --hf-path SRC --mlx-path DST`.

Quantized, 4 bits in groups of 64 unless told otherwise: the text decoder's linears, the token table and the per-layer
table. Norms, convolutions and AltUp's matrices stay in `--dtype`, and so do the audio tower (`--quantize-audio` changes
that) and both embedders. (AltUp's matrices mix the streams that all layers share; at 4 bits they would save 36 MB of
E2B's 3.9 GB.) The vision tower's bytes are carried through as they are.

Everything is checked before anything is written, from the files' headers and the config alone. Then tensors pass
through a few rows at a time: groups lie along rows, so quantizing slices of rows is quantizing the whole, and memory
stays below 1 GB for a checkpoint of any size. mlx-lm's own conversion keeps the text decoder only.
"""

import copy
import json
import re
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import click
import mlx.core as mx
import numpy as np
from tqdm import tqdm

from mlx_gemma3n.config import Config, UserError, read_config
from mlx_gemma3n.files import NewTensor, SafetensorsWriter, StoredTensor, refuse_existing, stored_tensors, write_aside
from mlx_gemma3n.loading import find_checkpoint, weight_files
from mlx_gemma3n.names import VISION_TOWER, Shape, expected_shapes, is_dead, to_hf, to_mlx, transposition

BITS, GROUP_SIZES = (4, 8), (32, 64, 128)
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
SLICE_BYTES = 32 * 2**20

_QUANTIZED_TEXT = re.compile(
    r"language_model\.(embed_tokens|embed_tokens_per_layer|per_layer_model_projection"
    r"|layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.\w+_proj|laurel\.linear_\w+|per_layer_input_gate|per_layer_projection)"
    r")\.weight"
)
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz"}
_ARRAYS = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


@dataclass(frozen=True)
class Quantization:
    group_size: int
    bits: int


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        source_bytes, bytes: of the tensors, before and after.
        fallbacks: group size that a module got instead of the one asked for; None where it stays in `dtype`.
        left_out: of the vision and audio parts, those that were not taken along.
    """

    folder: Path
    source_bytes: int
    bytes: int
    dtype: str
    fallbacks: dict[str, Optional[int]]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.folder}: {_size(self.source_bytes)} -> {_size(self.bytes)}"]
        if self.left_out:
            lines[0] += f", without {', '.join(self.left_out)}"
        outcomes: dict[str, Counter] = {}
        for path, size in self.fallbacks.items():
            outcome = f"stay in {self.dtype}" if size is None else f"in groups of {size}"
            outcomes.setdefault(outcome, Counter())[path.split(".")[-1]] += 1
        if outcomes:
            counts = {what: ", ".join(f"{n} {name}" for name, n in names.items()) for what, names in outcomes.items()}
            said = "; ".join(f"{what}: {names}" for what, names in counts.items())
            lines.append(f"rows that the group size does not divide {said}")
        return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


@dataclass(frozen=True)
class _Item:
    """A tensor on its way: where it is, what it becomes."""

    path: str
    stored: StoredTensor
    shape: Shape
    quantization: Optional[Quantization] = None
    carried: bool = False

    def outputs(self, dtype: str) -> list[NewTensor]:
        if self.carried:
            return [NewTensor(self.path, self.stored.dtype, self.shape)]
        if self.quantization is None:
            return [NewTensor(self.path, DTYPES[dtype], self.shape)]
        rows, columns = self.shape
        module = self.path.removesuffix(".weight")
        groups = (rows, columns // self.quantization.group_size)
        return [
            NewTensor(self.path, "U32", (rows, columns * self.quantization.bits // 32)),
            NewTensor(f"{module}.scales", DTYPES[dtype], groups),
            NewTensor(f"{module}.biases", DTYPES[dtype], groups),
        ]


def is_quantized(path: str, quantize_audio: bool = False) -> bool:
    """Whether our tensor `path` is a matrix that conversion quantizes."""
    if _QUANTIZED_TEXT.fullmatch(path):
        return True
    audio = path.startswith("audio_tower.") and transposition(path) is None
    # Norms are vectors of the same suffix; their names say so.
    return quantize_audio and audio and path.endswith(".weight") and "norm" not in path.split(".")[-2]


def _source_tensors(folder: Path) -> list[StoredTensor]:
    tensors = [tensor for file in weight_files(folder) for tensor in stored_tensors(file)]
    for tensor in tensors:
        if tensor.metadata.get("format") == "mlx" or tensor.name.endswith(".scales"):
            raise UserError(f"{tensor.file}: {tensor.name} is an MLX checkpoint's; convert the one it was made from")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if lost := sorted(named.keys() - {tensor.name for tensor in tensors}):
            raise UserError(f"{index}: names {lost[0]} in {named[lost[0]]}, which does not hold it; fetch both again")
    return tensors


def _check_config(folder: Path, values: dict[str, Any]) -> None:
    path = folder / "config.json"
    if quantization := values.get("quantization_config") or values.get("quantization"):
        method = quantization.get("quant_method", "mlx") if isinstance(quantization, dict) else quantization
        raise UserError(f"{path}: the checkpoint is quantized already ({method}); convert the one it was made from")
    for section in (values, values.get("text_config") or {}):
        if section.get("tie_word_embeddings") is False:
            raise UserError(f"{path}: tie_word_embeddings is false; Gemma 3n has one table for both ends")


def _select(
    folder: Path, config: Config, tensors: list[StoredTensor], drop_vision: bool, text_only: bool
) -> tuple[list[_Item], set[str]]:
    """What the model reads and what is carried along, checked; and the parts that were left out."""
    expected = expected_shapes(config)
    found: dict[str, _Item] = {}
    left_out: set[str] = set()
    wrong = []
    for tensor in tensors:
        path = to_mlx(tensor.name)
        if path is None or is_dead(path, config.text_config):
            continue
        part = path.split(".")[0]
        if (text_only and part != "language_model") or (drop_vision and path.startswith(VISION_TOWER)):
            left_out.add(part)
            continue
        axes = transposition(path)
        shape = tuple(tensor.shape[i] for i in axes) if axes and len(axes) == len(tensor.shape) else tensor.shape
        item = _Item(path, tensor, shape, carried=path.startswith(VISION_TOWER))
        if path in found:
            wrong.append(f"{tensor.name} is there twice, in {found[path].stored.file.name} and {tensor.file.name}")
        elif item.carried:
            pass
        elif path not in expected:
            wrong.append(f"{tensor.name} is unexpected")
        elif shape != expected[path]:
            wrong.append(f"{tensor.name} is {list(shape)}, the config says {list(expected[path])}")
        elif tensor.dtype not in _ARRAYS:
            wrong.append(f"{tensor.name} is {tensor.dtype}, not bfloat16, float16 or float32")
        found[path] = item
    wanted = [path for path in expected if path.startswith("language_model.") or not text_only]
    wrong = [f"{to_hf(path)} is missing" for path in wanted if path not in found] + wrong
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise UserError(f"{folder}: the weights do not fit config.json: {'; '.join(wrong[:5])}{more}")
    ordered = [found[path] for path in wanted]
    return ordered + [item for item in found.values() if item.carried], left_out


def _quantize_items(
    items: list[_Item], wanted: Quantization, quantize_audio: bool
) -> tuple[list[_Item], dict[str, Optional[int]]]:
    """Each matrix in the widest groups, up to those wanted, that divide its rows."""
    sizes = [size for size in (128, 64, 32) if size <= wanted.group_size]
    fallbacks: dict[str, Optional[int]] = {}
    chosen = []
    for item in items:
        if is_quantized(item.path, quantize_audio):
            size = next((size for size in sizes if item.shape[-1] % size == 0), None)
            if size != wanted.group_size:
                fallbacks[item.path.removesuffix(".weight")] = size
            if size is not None:
                item = replace(item, quantization=Quantization(size, wanted.bits))
        chosen.append(item)
    return chosen, fallbacks


def _new_config(
    values: dict[str, Any],
    wanted: Optional[Quantization],
    items: list[_Item],
    dtype: str,
    text_only: bool,
    hub_id: Optional[str],
) -> dict[str, Any]:
    values = copy.deepcopy(values)
    if hub_id is not None:
        # So that an adapter trained on this folder can name the base that others have.
        values["_name_or_path"] = hub_id
    for section in (values, values.get("text_config"), values.get("audio_config")):
        for key in ("dtype", "torch_dtype"):
            if section and key in section:
                section[key] = dtype
    if text_only and values["model_type"] == "gemma3n":
        values["audio_config"] = values["vision_config"] = None
    if wanted is not None:
        values["quantization"] = {"group_size": wanted.group_size, "bits": wanted.bits, "mode": "affine"} | {
            item.path.removesuffix(".weight"): {
                "group_size": item.quantization.group_size,
                "bits": item.quantization.bits,
                "mode": "affine",
            }
            for item in items
            if item.quantization not in (None, wanted)
        }
    return values


def _as_mlx(raw: bytearray, dtype: str, shape: Shape) -> mx.array:
    array = mx.array(np.frombuffer(raw, _ARRAYS[dtype]).reshape(shape))
    return array.view(mx.bfloat16) if dtype == "BF16" else array


def _as_bytes(array: mx.array) -> np.ndarray:
    # A transposed array comes as a view with strides.
    return np.ascontiguousarray(np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array))


def _convert_item(item: _Item, dtype: str, writer: SafetensorsWriter, bar: tqdm) -> None:
    stored, axes = item.stored, None if item.carried else transposition(item.path)
    names = [tensor.name for tensor in item.outputs(dtype)]
    # A transposed tensor is a small convolution and goes as a whole.
    for begin, end in [(0, stored.shape[0])] if axes else stored.slices(SLICE_BYTES):
        raw = stored.read(begin, end)
        if item.carried:
            writer.write(item.path, raw)
        else:
            rows = _as_mlx(raw, stored.dtype, (end - begin, *stored.shape[1:]) if stored.shape else ())
            if axes:
                rows = rows.transpose(axes)
            # To the wanted type first, as mlx-lm does: the scales are of that type and fit the values they stand for.
            rows = rows.astype(getattr(mx, dtype))
            if dtype == "float16" and not mx.isfinite(rows).all().item():
                raise UserError(f"{stored.file}: {stored.name} does not fit into float16; use --dtype bfloat16")
            quantization = item.quantization
            outputs = [rows]
            if quantization is not None:
                outputs = mx.quantize(rows, group_size=quantization.group_size, bits=quantization.bits)
            mx.eval(outputs)
            for name, output in zip(names, outputs):
                writer.write(name, _as_bytes(output))
            del rows, outputs
            mx.clear_cache()
        bar.update(len(raw))


def _copy_others(source: Path, target: Path) -> None:
    """Tokenizer, processor, generation and chat template files: all that is neither weights nor an index nor hidden."""
    for file in sorted(source.iterdir()):
        skipped = file.name.startswith(".") or file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not skipped and file.name != "config.json":
            shutil.copyfile(file, target / file.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name)


def convert(
    hf_path: str | Path,
    mlx_path: str | Path,
    q_bits: Optional[int] = 4,
    q_group_size: int = 64,
    dtype: str = "bfloat16",
    quantize_audio: bool = False,
    drop_vision: bool = False,
    text_only: bool = False,
) -> Conversion:
    """Writes the MLX checkpoint folder `mlx_path`, whole or not at all.

    Args:
        hf_path: a Hugging Face checkpoint folder, or a Hub id.
        mlx_path: a folder that does not exist, or is empty.
        q_bits: 4, 8, or None to quantize nothing.
        q_group_size: 32, 64 or 128; where it does not divide a row, the next smaller that does.
        dtype: "bfloat16", "float16" or "float32", of what is not quantized and of scales and biases.
        quantize_audio: quantize the audio tower's linears too.
        drop_vision: leave the vision tower out; the embeddings of its token ids stay.
        text_only: leave out all but the text decoder.

    Raises:
        UserError: the source cannot be read, is no Gemma 3n, or has tensors missing, unexpected or wrongly shaped; or
            the target exists.
    """
    if q_bits not in (None, *BITS) or q_group_size not in GROUP_SIZES or dtype not in DTYPES:
        known = f"{BITS} or None, {GROUP_SIZES} and {tuple(DTYPES)}"
        raise UserError(f"q_bits {q_bits}, q_group_size {q_group_size}, dtype {dtype!r}: known are {known}")
    source, target = find_checkpoint(hf_path), Path(mlx_path)
    if target.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{target}: lies in the source {source}; name a folder outside of it")
    refuse_existing(target)
    values = read_config(source)
    _check_config(source, values)
    config = Config.load(source)
    tensors = _source_tensors(source)
    items, left_out = _select(source, config, tensors, drop_vision, text_only)
    wanted = None if q_bits is None else Quantization(q_group_size, q_bits)
    fallbacks: dict[str, Optional[int]] = {}
    if wanted is not None:
        items, fallbacks = _quantize_items(items, wanted, quantize_audio)

    outputs = [tensor for item in items for tensor in item.outputs(dtype)]
    with write_aside(target) as aside:
        _copy_others(source, aside)
        hub_id = None if Path(hf_path).is_dir() else str(hf_path)
        text = json.dumps(_new_config(values, wanted, items, dtype, text_only, hub_id), indent=2) + "\n"
        (aside / "config.json").write_text(text, encoding="utf-8")
        total = sum(item.stored.nbytes for item in items)
        # What takes less than a second needs no bar.
        with tqdm(total=total, desc="converting", unit="B", unit_scale=True, delay=1) as bar:
            with SafetensorsWriter(aside, outputs, {"format": "mlx"}) as writer:
                for item in items:
                    _convert_item(item, dtype, writer, bar)
    return Conversion(
        folder=target,
        source_bytes=sum(tensor.nbytes for tensor in tensors),
        bytes=sum(tensor.nbytes for tensor in outputs),
        dtype=dtype,
        fallbacks=fallbacks,
        left_out=tuple(sorted(left_out)),
    )


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--hf-path", required=True, help="Hugging Face checkpoint: a folder, or a Hub id (owner/name).")
@click.option("--mlx-path", required=True, type=click.Path(), help="Folder to write; it must not exist or be empty.")
@click.option("--q-bits", type=click.Choice(["4", "8", "none"]), default="4", help="Bits of a quantized weight.")
@click.option(
    "--q-group-size",
    type=click.Choice([str(size) for size in GROUP_SIZES]),
    default="64",
    help="Weights that share a scale; smaller where a row cannot be divided so.",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", help="Of all that is not quantized.")
@click.option("--quantize-audio", is_flag=True, help="Quantize the audio tower's linears too.")
@click.option("--drop-vision", is_flag=True, help="Leave out the vision tower; nothing here reads it.")
@click.option("--text-only", is_flag=True, help="Leave out all but the text decoder.")
def main(hf_path: str, mlx_path: str, q_bits: str, q_group_size: str, **options: Any) -> None:
    """Convert a Hugging Face Gemma 3n checkpoint to MLX, quantized."""
    bits = None if q_bits == "none" else int(q_bits)
    click.echo(convert(hf_path, mlx_path, bits, int(q_group_size), **options))


if __name__ == "__main__":
    from mlx_gemma3n.cli import run

    run(main)
