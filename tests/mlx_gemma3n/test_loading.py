"""Checkpoint folders as they come: spellings, shards, dtypes, dead weights, and what is wrong with them."""

import copy
import gc
import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten, tree_map
from safetensors.torch import load_file, save_file
from transformers import Gemma3nForConditionalGeneration

from convert.checkpoint import convert
from mlx_gemma3n import load, lora
from mlx_gemma3n.config import UserError
from mlx_gemma3n.loading import find_checkpoint, load_model, release
from tests.reference import awkward_model, mixed_batch, save_reference, worst


@pytest.fixture(scope="module")
def reference():
    return awkward_model("five")


@pytest.fixture(scope="module")
def saved(reference, tmp_path_factory):
    return save_reference(reference, tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def batch(reference):
    return mixed_batch(reference.config)


@pytest.fixture(scope="module")
def want(reference, batch):
    with torch.no_grad():
        return reference(**batch.torch()).logits.numpy()


def difference(folder, batch, want) -> float:
    real = batch.attention_mask.astype(bool)
    return worst(np.array(load_model(folder, mx.float32)(**batch.mlx()))[real], want[real])


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def edit_config(folder, change) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_the_hubs_spelling_of_rotary_bases(folder, batch, want):
    def respell(values):
        ropes = values["text_config"].pop("rope_parameters")
        values["text_config"]["rope_theta"] = ropes["full_attention"]["rope_theta"]
        values["text_config"]["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]

    edit_config(folder, respell)
    assert difference(folder, batch, want) <= 1e-4


def test_other_rotary_bases_are_read_from_either_spelling(folder, batch, want):
    def rebase(values):
        values["text_config"]["rope_parameters"]["full_attention"]["rope_theta"] = 77.0

    edit_config(folder, rebase)
    assert difference(folder, batch, want) > 1e-3


def test_dead_keys_and_values_are_ignored(folder, batch, want):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for end in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        living = tensors[f"model.language_model.layers.0.self_attn.{end}"]
        for layer in range(4, 9):
            tensors[f"model.language_model.layers.{layer}.self_attn.{end}"] = torch.randn_like(living)
    save_file(tensors, path, metadata={"format": "pt"})
    assert difference(folder, batch, want) <= 1e-4
    assert not any("layers.4.self_attn.k_proj" in name for name, _ in tree_flatten(load_model(folder).parameters()))


def test_many_shards(reference, tmp_path, batch, want):
    reference.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert difference(tmp_path, batch, want) <= 1e-4
    next(tmp_path.glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(UserError, match="model-00002-of.*fetch it again"):
        load_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_compute_in_float32(reference, tmp_path, batch, dtype):
    copy.deepcopy(reference).to(dtype).save_pretrained(tmp_path)
    # Loaded again: `.float()` would leave the buffers that `.to(dtype)` rounded.
    widened = Gemma3nForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        want = widened(**batch.torch()).logits.numpy()
    assert difference(tmp_path, batch, want) <= 1e-4


def test_missing_unexpected_and_misshapen_tensors_are_named(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.language_model.norm.weight"]
    tensors["model.language_model.layers.1.self_attn.bogus.weight"] = torch.zeros(3)
    tensors["model.embed_audio.embedding_projection.weight"] = torch.zeros(2, 2)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError) as error:
        load_model(folder)
    text = str(error.value)
    assert "language_model.norm.weight is missing" in text
    assert "language_model.layers.1.self_attn.bogus.weight is unexpected" in text
    assert "embed_audio.embedding_projection.weight is [2, 2], config.json asks for [64, 48]" in text


@pytest.mark.parametrize("change", ["missing", "misshapen", "unexpected"])
def test_the_per_layer_table_is_checked_too(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.language_model.embed_tokens_per_layer.weight"
    if change == "missing":
        del tensors[name]
    elif change == "misshapen":
        tensors[name] = tensors[name][:-1].clone()
    else:
        tensors[name.replace("weight", "scales")] = torch.zeros(480, 2)
    save_file(tensors, path, metadata={"format": "pt"})
    said = {
        "missing": "weight is missing",
        "misshapen": r"weight is \[479, 144\], config.json asks for \[480, 144\]",
        "unexpected": "scales is unexpected",
    }
    with pytest.raises(
        UserError, match=f"do not fit config.json: language_model.embed_tokens_per_layer.{said[change]}"
    ):
        load_model(folder)


def test_a_truncated_file_is_one_line(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UserError, match="model.safetensors: .*fetch it again"):
        model = load_model(folder)
        mx.eval(model.parameters())


@pytest.mark.parametrize("name", ["no/such/folder/here", "nowhere", "owner/absent-repository"])
def test_what_is_neither_folder_nor_hub_id(name):
    with pytest.raises(UserError, match=name):
        find_checkpoint(name)


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no .safetensors files"):
        load_model(folder)


def test_load_gives_model_and_processor(folder):
    from train.demo.tokenizer import write_processor

    write_processor(folder, 20)
    model, processor = load(folder)
    example = processor([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert model(mx.array(example.input_ids)[None]).shape == (1, len(example.input_ids), 512)


# --- parts that are given back ---


@pytest.fixture(scope="module")
def quantized(saved, tmp_path_factory):
    """With a quantized audio tower."""
    path = tmp_path_factory.mktemp("quantized") / "mlx"
    convert(saved, path, 4, 32, quantize_audio=True)
    return path


def active_memory() -> int:
    gc.collect()
    # What was computed may be there before the intermediates are gone.
    mx.synchronize()
    return mx.get_active_memory()


def base_bytes(module) -> int:
    return sum(weight.nbytes for name, weight in tree_flatten(module.parameters()) if "lora_" not in name)


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapted"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["saved", "quantized"])
def test_a_released_audio_tower_gives_its_memory_back_and_the_same_bits(request, batch, kind, dtype, adapted):
    folder = request.getfixturevalue(kind)
    model = load_model(folder, dtype)
    if adapted:
        lora.attach(model, lora.AdapterConfig(lora.resolve_targets(model, "language+audio"), r=2))
        model.update(tree_map(lambda w: w + 0.01, model.trainable_parameters()))
    features, mask = mx.array(batch.input_features), mx.array(batch.input_features_mask)
    encode = lambda: np.array(model.encode_audio(features, mask).astype(mx.float32))
    parameters = lambda: {name: np.array(w.view(mx.uint8)) for name, w in tree_flatten(model.parameters())}
    mx.eval(model.parameters())
    want, before, trainable = encode(), parameters(), set(dict(tree_flatten(model.trainable_parameters())))
    size = base_bytes(model.audio_tower)
    # Twice: the weights that the encoding reads are there to be given back again.
    for _ in range(2):
        held = active_memory()
        release(model, folder)
        # What the allocator adds to each array comes on top.
        assert size <= held - active_memory() < 1.3 * size
        assert np.array_equal(encode(), want)
    after = parameters()
    assert after.keys() == before.keys() and all(np.array_equal(after[name], before[name]) for name in before)
    assert set(dict(tree_flatten(model.trainable_parameters()))) == trainable
    if adapted:
        plain = lora.detach(model)
        release(plain, folder)
        assert not np.array_equal(encode(), want)


def test_a_released_tower_is_trained_as_before(saved, batch):
    model = load_model(saved, mx.float32)
    lora.attach(model, lora.AdapterConfig(lora.resolve_targets(model, "language+audio"), r=2))
    model.update(tree_map(lambda w: w + 0.01, model.trainable_parameters()))

    def gradients() -> dict:
        def loss(parameters: dict) -> mx.array:
            model.update(parameters)
            return mx.mean(mx.square(model(**batch.mlx())))

        parameters = model.trainable_parameters()
        found = mx.grad(loss)(parameters)
        mx.eval(found)
        model.update(parameters)
        return dict(tree_flatten(found))

    want = gradients()
    release(model, saved)
    found = gradients()
    assert sum("audio_tower" in name for name in found) > 20
    assert all(mx.array_equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("part", ["embed_audio", "language_model"])
def test_other_parts_can_be_released(quantized, batch, part):
    model = load_model(quantized, mx.float32)
    want = np.array(model(**batch.mlx()))
    mx.eval(model.parameters())
    size, held = base_bytes(model[part]), active_memory()
    release(model, quantized, part)
    assert held - active_memory() >= size
    assert np.array_equal(np.array(model(**batch.mlx())), want)


def test_parts_that_cannot_be_released(saved, quantized, folder, tmp_path):
    model = load_model(quantized, mx.float32)
    with pytest.raises(ValueError, match="the model has no vision_tower"):
        release(model, quantized, "vision_tower")
    convert(saved, tmp_path / "text", text_only=True)
    with pytest.raises(ValueError, match="the model has no audio_tower"):
        release(load_model(tmp_path / "text"), tmp_path / "text")
    before = dict(tree_flatten(model.parameters()))
    lora.attach(model, lora.AdapterConfig(lora.resolve_targets(model, "language+audio"), r=2))
    with pytest.raises(UserError) as error:
        release(model, saved)
    start = f"{saved}: the weights do not fit the model: audio_tower.conformer.0.ffw_layer_end.ffw_layer_2."
    assert str(error.value).startswith(start) and str(error.value).endswith(" more")
    assert ".linear" not in str(error.value)
    path = folder / "model.safetensors"
    for damage, said in ((b"\0" * 100, "model.safetensors: .*fetch it again"), (None, "no .safetensors files")):
        path.write_bytes(damage) if damage else path.unlink()
        with pytest.raises(UserError, match=said):
            release(model, folder)
    # Nothing was given back.
    after = dict(tree_flatten(lora.detach(model).parameters()))
    assert all(after[name] is weight for name, weight in before.items())
