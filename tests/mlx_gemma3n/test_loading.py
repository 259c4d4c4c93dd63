"""Checkpoint folders as they come: spellings, shards, dtypes, dead weights, and what is wrong with them."""

import copy
import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten
from safetensors.torch import load_file, save_file
from transformers import Gemma3nForConditionalGeneration

from mlx_gemma3n import load
from mlx_gemma3n.config import UserError
from mlx_gemma3n.loading import find_checkpoint, load_model
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
    assert "embed_audio.embedding_projection.weight is [2, 2], the config says [64, 48]" in text


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
