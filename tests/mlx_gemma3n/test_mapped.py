"""The table that stays in its file: the bits of `nn.Embedding` and `nn.QuantizedEmbedding`, and none of the memory."""

import gc
import json
import os
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten, tree_map

from convert.checkpoint import convert
from mlx_gemma3n import lora
from mlx_gemma3n.config import UserError
from mlx_gemma3n.files import stored_tensors
from mlx_gemma3n.generate import generate
from mlx_gemma3n.loading import load_model
from mlx_gemma3n.mapped import MappedEmbedding
from tests.reference import (
    AWKWARD,
    TEXT_IDS,
    VOCABULARY,
    awkward_model,
    reference_config,
    reference_model,
    save_reference,
)

ROWS, WIDTH = 100, 128
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
# Repeats, both ends, and any shape.
IDS = [[3, 99, 3, 0, 57, 3, 99], [[5, 5], [0, 41], [99, 5]], [[[7]]], 8, [], [[], []]]


def same_bits(a: mx.array, b: mx.array) -> bool:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    return not a.size or mx.array_equal(a.reshape(-1).view(mx.uint8), b.reshape(-1).view(mx.uint8)).item()


def rows_like(dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((ROWS, WIDTH), key=mx.random.key(0)).astype(dtype)


def as_ids(ids) -> mx.array:
    return mx.array(np.array(ids, np.int32))


def store(file, **tensors: mx.array) -> dict:
    """Writes `tensors` among others, so that the table does not begin at a page."""
    mx.save_safetensors(str(file), {"aside": mx.zeros((3, 7)), **tensors})
    return {tensor.name: tensor for tensor in stored_tensors(file) if tensor.name in tensors}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("file_dtype", DTYPES, ids=str)
def test_it_is_an_embedding(tmp_path, file_dtype, dtype):
    rows = rows_like(file_dtype)
    mapped = MappedEmbedding(**store(tmp_path / "a.safetensors", weight=rows), dtype=dtype)
    table = nn.Embedding(ROWS, WIDTH)
    table.weight = rows.astype(dtype)
    for ids in IDS:
        assert same_bits(mapped(as_ids(ids)), table(as_ids(ids))), ids
    for kind in (mx.uint32, mx.int64, mx.uint8):
        assert same_bits(mapped(mx.arange(ROWS).astype(kind)), table.weight)
    assert (mapped.num_embeddings, mapped.dims) == (ROWS, WIDTH)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("file_dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    "mode, group_size, bits",
    [("affine", size, bits) for size in (32, 64) for bits in (4, 8)]
    + [("affine", 64, 3), ("affine", 128, 6), ("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)],
)
def test_it_is_a_quantized_embedding(tmp_path, mode, group_size, bits, file_dtype, dtype):
    parts = mx.quantize(rows_like(file_dtype), group_size=group_size, bits=bits, mode=mode)
    tensors = dict(zip(("weight", "scales", "biases"), parts))
    options = dict(group_size=group_size, bits=bits, mode=mode)
    mapped = MappedEmbedding(**store(tmp_path / "a.safetensors", **tensors), dtype=dtype, **options)
    table = nn.QuantizedEmbedding(ROWS, WIDTH, **options)
    floating = lambda t: mx.issubdtype(t.dtype, mx.floating)
    table.update({name: t.astype(dtype) if floating(t) else t for name, t in tensors.items()})
    for ids in map(as_ids, IDS):
        # MLX dequantizes no single row by itself, and not none.
        if ids.ndim and ids.size:
            assert same_bits(mapped(ids), table(ids)), ids
        assert mapped(ids).shape == (*ids.shape, WIDTH)
    assert same_bits(mapped(mx.arange(ROWS)), table(mx.arange(ROWS)))
    assert (mapped.num_embeddings, mapped.dims) == (ROWS, WIDTH)


def test_ids_without_a_row_are_refused(tmp_path):
    mapped = MappedEmbedding(**store(tmp_path / "a.safetensors", weight=rows_like(mx.float32)), dtype=mx.float32)
    for ids, wrong in (([3, 100, 5], 100), ([[-1, 3]], -1), ([-2, 4000], -2)):
        with pytest.raises(ValueError, match=f"id {wrong} in a table of 100 rows"):
            mapped(as_ids(ids))


def test_it_is_no_parameter(tmp_path):
    parts = zip(("weight", "scales", "biases"), mx.quantize(rows_like(mx.float32)))
    tensors = store(tmp_path / "a.safetensors", **dict(parts))
    for mapped in (
        MappedEmbedding(tensors["weight"], mx.float32),
        MappedEmbedding(**tensors, dtype=mx.float32, group_size=64, bits=4),
    ):
        assert not tree_flatten(mapped.parameters()) and not tree_flatten(mapped.trainable_parameters())
        assert "100" in repr(mapped) and "a.safetensors" in repr(mapped)


def test_a_file_is_held_open(tmp_path):
    rows = rows_like(mx.bfloat16)
    mapped = MappedEmbedding(**store(tmp_path / "a.safetensors", weight=rows), dtype=mx.bfloat16)
    store(tmp_path / "b.safetensors", weight=rows + 1)
    os.replace(tmp_path / "b.safetensors", tmp_path / "a.safetensors")
    assert same_bits(mapped(mx.arange(ROWS)), rows)
    (tmp_path / "a.safetensors").unlink()
    assert same_bits(mapped(mx.arange(ROWS)), rows)


def test_files_that_cannot_be_read_are_one_line(tmp_path):
    file = tmp_path / "a.safetensors"
    tensors = store(file, weight=rows_like(mx.float32))
    mapped = MappedEmbedding(**tensors, dtype=mx.float32)
    last = mx.array([ROWS - 1])
    mapped(last)
    # Cut at a whole page too: what lies in the last one can still be read, as zeros.
    for size in (tensors["weight"].offset + tensors["weight"].nbytes - 1, 4096, 0):
        os.truncate(file, size)
        for read in (
            lambda: mapped(last),
            lambda: mapped(mx.array([0])),
            lambda: MappedEmbedding(**tensors, dtype=mx.float32),
        ):
            with pytest.raises(UserError) as error:
                read()
            assert str(error.value).startswith(f"{file}: ") and "\n" not in str(error.value)
    file.unlink()
    with pytest.raises(UserError, match="a.safetensors: cannot be opened .No such file"):
        MappedEmbedding(**tensors, dtype=mx.float32)
    numbers = store(file, weight=mx.zeros((4, 4), mx.int32))
    with pytest.raises(UserError, match="a.safetensors: weight is of type I32"):
        MappedEmbedding(**numbers, dtype=mx.float32)


# --- in a model ---


def with_table_in_memory(folder, dtype):
    """The model of a folder, its per-layer table held in memory by MLX's own module."""
    model = load_model(folder, dtype)
    mapped, tensors = model.language_model.embed_tokens_per_layer, {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in mx.load(str(file)).items():
            if "embed_tokens_per_layer" in name:
                floating = mx.issubdtype(tensor.dtype, mx.floating)
                tensors[name.rpartition(".")[2]] = tensor.astype(dtype) if floating else tensor
    if "scales" in tensors:
        table = nn.QuantizedEmbedding(mapped.num_embeddings, mapped.dims, mapped.group_size, mapped.bits)
    else:
        table = nn.Embedding(mapped.num_embeddings, mapped.dims)
    table.update(tensors)
    model.language_model.embed_tokens_per_layer = table
    return model


def split(folder, target) -> None:
    """The same checkpoint, every tensor in a file of its own."""
    target.mkdir()
    weight_map = {}
    for name, tensor in mx.load(str(folder / "model.safetensors")).items():
        weight_map[name] = f"{name}.safetensors"
        mx.save_safetensors(str(target / weight_map[name]), {name: tensor}, metadata={"format": "mlx"})
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints by kind: transformers' own and converted ones, in one file and in many."""
    path = tmp_path_factory.mktemp("folders")
    model = awkward_model("unshared")
    save_reference(model, path / "hf")
    save_reference(model, path / "hf-shards", max_shard_size="100KB")
    save_reference(model.to(torch.bfloat16), path / "hf-bfloat16")
    convert(path / "hf", path / "4-bit", 4)
    convert(path / "hf", path / "8-bit", 8, 32, dtype="float32")
    split(path / "4-bit", path / "4-bit-shards")
    return path


KINDS = ["hf", "hf-shards", "hf-bfloat16", "4-bit", "8-bit", "4-bit-shards"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_the_same_to_the_bit(folders, kind, dtype):
    mapped, whole = load_model(folders / kind, dtype), with_table_in_memory(folders / kind, dtype)
    assert isinstance(mapped.language_model.embed_tokens_per_layer, MappedEmbedding)
    quantized = isinstance(whole.language_model.embed_tokens_per_layer, nn.QuantizedEmbedding)
    assert quantized == ("bit" in kind)
    # Also ids of clips, which the per-layer table has no rows for.
    ids = mx.array(np.random.default_rng(0).integers(0, VOCABULARY, (2, 23)))
    table = lambda model: model.language_model.embed_tokens_per_layer(ids % TEXT_IDS)
    assert same_bits(table(mapped), table(whole))
    assert same_bits(mapped(ids), whole(ids))
    names = lambda model: {name for name, _ in tree_flatten(model.parameters())}
    assert {n.rpartition(".")[0] for n in names(whole) - names(mapped)} == {"language_model.embed_tokens_per_layer"}
    assert not names(mapped) - names(whole)


@pytest.mark.parametrize("kind", ["hf", "4-bit"])
def test_gradients_are_the_same_to_the_bit(folders, kind):
    ids = mx.array(np.random.default_rng(0).integers(10, TEXT_IDS, (2, 23)))

    def gradients(model: nn.Module, checkpointed: bool) -> tuple[mx.array, dict]:
        mx.random.seed(0)
        lora.attach(model, lora.AdapterConfig(lora.resolve_targets(model, "language"), r=2))
        model.update(tree_map(lambda w: w + 0.01, model.trainable_parameters()))

        def loss(parameters: dict) -> mx.array:
            model.update(parameters)
            return mx.mean(mx.square(model(ids)))

        function = mx.checkpoint(loss) if checkpointed else loss
        value, found = mx.value_and_grad(function)(model.trainable_parameters())
        return value, dict(tree_flatten(found))

    models = load_model(folders / kind, mx.float32), with_table_in_memory(folders / kind, mx.float32)
    for checkpointed in (False, True):
        (value, found), (want, expected) = (gradients(lora.detach(model), checkpointed) for model in models)
        assert same_bits(value, want) and found.keys() == expected.keys() and len(found) > 50
        assert all(same_bits(found[name], expected[name]) for name in expected)
        assert all(mx.any(gradient != 0).item() for gradient in found.values())


def test_gradients_pass_by_it(folders):
    """What the rows are multiplied with has a gradient; the rows are constants."""
    table = load_model(folders / "4-bit", mx.float32).language_model.embed_tokens_per_layer
    ids = as_ids([[3, 99, 3], [0, 7, 99]])
    scale = mx.random.normal((table.dims,), key=mx.random.key(0))
    want = table(ids).sum(axis=(0, 1))
    function = lambda scale, ids: [(table(ids) * scale).sum()]
    _, (found,) = mx.vjp(lambda scale: function(scale, ids), [scale], [mx.array(1.0)])
    assert same_bits(found, want)
    _, (found, _) = mx.vjp(mx.checkpoint(function), [scale, ids], [mx.array(1.0)])
    assert same_bits(found, want)


def test_a_table_takes_no_memory(tmp_path):
    """64 MB of it, in a model of 2 MB."""
    awkward = AWKWARD["unshared"]
    text = {**awkward["text"], "vocab_size_per_layer_input": 16_384, "hidden_size_per_layer_input": 256}
    save_reference(reference_model(reference_config(text, awkward["audio"])), tmp_path)
    ids = mx.array(np.random.default_rng(0).integers(10, TEXT_IDS, (2, 100)))
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    model = load_model(tmp_path, mx.float32)
    assert 4 * 16_384 * model.language_model.embed_tokens_per_layer.dims == 64 * 2**20
    mx.eval(model.parameters())
    loaded = mx.get_active_memory() - before
    assert 2**20 < loaded < 4 * 2**20
    mx.reset_peak_memory()
    mx.eval(model(ids))
    assert mx.get_peak_memory() - before < 16 * 2**20
    gc.collect()
    mx.synchronize()
    assert mx.get_active_memory() - before < 4 * 2**20


def test_a_file_that_is_cut_while_a_model_runs(folders, tmp_path):
    folder = shutil.copytree(folders / "hf", tmp_path / "copy")
    file = folder / "model.safetensors"
    model = load_model(folder, mx.float32)
    mx.eval(model.parameters())
    tokens = generate(model, np.arange(10, 20), max_tokens=5)
    next(tokens)
    os.truncate(file, 100_000)
    with pytest.raises(UserError) as error:
        list(tokens)
    name = "model.language_model.embed_tokens_per_layer.weight"
    assert str(error.value) == f"{file}: ends within {name}; fetch it again"


def test_a_folder_may_go_while_a_model_runs(folders, tmp_path):
    folder = shutil.copytree(folders / "4-bit", tmp_path / "copy")
    ids = mx.array([[20, 30, 40]])
    model, whole = load_model(folder, mx.float32), with_table_in_memory(folder, mx.float32)
    shutil.rmtree(folder)
    assert same_bits(model(ids), whole(ids))
