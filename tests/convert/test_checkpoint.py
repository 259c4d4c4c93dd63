"""Conversion: its tensors against `mx.quantize`, its logits against transformers with the dequantized weights, its
refusals, and what an interrupted one leaves behind."""

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import Gemma3nForCausalLM

import convert.checkpoint
from convert.checkpoint import convert as convert_checkpoint
from convert.checkpoint import is_quantized, main
from mlx_gemma3n.config import Config, UserError
from mlx_gemma3n.loading import load_model
from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.names import VISION_TOWER, expected_shapes, inverse, to_hf, to_mlx, transposition
from tests.benchmarks.convert_memory import measure, sparse_checkpoint
from tests.reference import AWKWARD, TEXT_IDS, awkward_model, mixed_batch, reference_config, save_reference, worst

ROOT = Path(__file__).parents[2]
MX = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Of each awkward config: the transformers model and its checkpoint folder."""
    made: dict[str, tuple] = {}

    def get(name: str) -> tuple:
        if name not in made:
            model = awkward_model(name)
            made[name] = model, save_reference(model, tmp_path_factory.mktemp(name) / "hf")
        return made[name]

    return get


def read(folder: Path) -> dict[str, mx.array]:
    tensors: dict[str, mx.array] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= mx.load(str(file))
    return tensors


def overrides(folder: Path) -> tuple[Optional[dict], dict[str, dict]]:
    quantization = json.loads((folder / "config.json").read_text()).get("quantization")
    if quantization is None:
        return None, {}
    defaults = {k: v for k, v in quantization.items() if not isinstance(v, dict)}
    return defaults, {k: v for k, v in quantization.items() if isinstance(v, dict)}


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's weights as transformers calls and lays them out, in float32."""
    tensors = read(folder)
    defaults, by_path = overrides(folder)
    weights = {}
    for path, tensor in tensors.items():
        module = path.removesuffix(".weight")
        if path.endswith((".scales", ".biases")):
            continue
        if f"{module}.scales" in tensors:
            scales, biases = (tensors[f"{module}.{n}"].astype(mx.float32) for n in ("scales", "biases"))
            tensor = mx.dequantize(tensor, scales, biases, **by_path.get(module, defaults))
        elif tensor.dtype == mx.bfloat16:
            tensor = tensor.astype(mx.float32)
        axes = transposition(path)
        array = np.array(tensor.transpose(inverse(axes)) if axes else tensor)
        weights[to_hf(path)] = torch.from_numpy(array.copy())
    return weights


@pytest.mark.parametrize("bits, dtype", [(4, "bfloat16"), (8, "float32"), (None, "bfloat16"), (None, "float16")])
@pytest.mark.parametrize("name", AWKWARD)
def test_every_tensor_is_what_mlx_makes_of_it(references, tmp_path, name, bits, dtype):
    _, source = references(name)
    result = convert_checkpoint(source, tmp_path / "mlx", bits, dtype=dtype)
    stored = read(tmp_path / "mlx")
    defaults, by_path = overrides(tmp_path / "mlx")
    assert (defaults is None) == (bits is None)
    unseen = set(stored)
    for hf, tensor in load_file(source / "model.safetensors").items():
        path = to_mlx(hf)
        unseen.discard(path)
        if path.startswith(VISION_TOWER):
            continue
        whole = mx.array(tensor.numpy())
        if axes := transposition(path):
            whole = whole.transpose(axes)
        whole = whole.astype(MX[dtype])
        module = path.removesuffix(".weight")
        if f"{module}.scales" in stored:
            assert is_quantized(path)
            size = by_path.get(module, defaults)["group_size"]
            # The widest group that divides, and those that differ from the default are named.
            assert size == next(s for s in (64, 32) if whole.shape[-1] % s == 0)
            assert (size == 64) == (module not in by_path)
            expected = dict(zip(("weight", "scales", "biases"), mx.quantize(whole, group_size=size, bits=bits)))
            for kind, value in expected.items():
                assert stored[f"{module}.{kind}"].dtype == value.dtype
                assert mx.array_equal(stored[f"{module}.{kind}"], value), path
                unseen.discard(f"{module}.{kind}")
            assert result.fallbacks.get(module) == (None if size == 64 else size)
        else:
            assert bits is None or not is_quantized(path) or whole.shape[-1] % 32
            assert stored[path].dtype == MX[dtype]
            assert mx.array_equal(stored[path], whole), path
            if bits is not None and is_quantized(path):
                assert result.fallbacks[module] is None
    assert not unseen
    assert result.bytes == sum(tensor.nbytes for tensor in stored.values())


@pytest.mark.parametrize(
    "name, options",
    [(name, dict(q_bits=4)) for name in AWKWARD]
    + [
        ("five", dict(q_bits=8)),
        ("ten", dict(q_bits=None)),
        ("wide_window", dict(q_bits=4, q_group_size=32, dtype="float16", quantize_audio=True)),
        ("unshared", dict(q_bits=8, dtype="float32", quantize_audio=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(str(v) for v in value.values()),
)
def test_logits_are_transformers_with_the_dequantized_weights(references, tmp_path, name, options):
    """Text, and clips of different lengths."""
    _, source = references(name)
    convert_checkpoint(source, tmp_path / "mlx", **options)
    reference = awkward_model(name)
    weights = dequantized(tmp_path / "mlx")
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"]
    reference.load_state_dict(weights, strict=True)
    batch = mixed_batch(reference.config)
    text = dict(input_ids=batch.input_ids[1:2, :17])
    model = load_model(tmp_path / "mlx", dtype=mx.float32)
    with torch.no_grad():
        heard = reference(**batch.torch()).logits
        written = reference(input_ids=torch.from_numpy(text["input_ids"])).logits
    real = batch.attention_mask.astype(bool)
    assert worst(np.array(model(**batch.mlx()))[real], heard.numpy()[real]) <= 1e-3
    assert worst(model(mx.array(text["input_ids"])), written) <= 1e-3


@pytest.mark.parametrize("audio", [False, True])
def test_what_is_quantized(audio):
    """Every linear and table of the text decoder but AltUp's, none of the embedders', the audio tower's if asked."""
    config = Config.from_dict(json.loads(reference_config(**AWKWARD["five"]).to_json_string()))
    modules = dict(Gemma3n(config).named_modules())
    for path in expected_shapes(config):
        module = path.removesuffix(".weight")
        matrix = path.endswith(".weight") and isinstance(modules[module], (nn.Linear, nn.Embedding))
        text = path.startswith("language_model.") and "altup" not in path
        assert is_quantized(path, audio) == (matrix and (text or audio and path.startswith("audio_tower."))), path


def test_the_published_models_need_no_fallback():
    """Rows of E2B and E4B, audio tower included, are multiples of 64."""
    for text in (dict(num_hidden_layers=30, intermediate_size=8192, num_kv_shared_layers=10), {}):
        config = Config.from_dict({"model_type": "gemma3n", "text_config": text, "audio_config": {"hidden_size": 1536}})
        shapes = {path: shape for path, shape in expected_shapes(config).items() if is_quantized(path, True)}
        assert len(shapes) > 400 and all(shape[-1] % 64 == 0 for shape in shapes.values())


def test_slices_of_rows_quantize_as_the_whole(references, tmp_path, monkeypatch):
    _, source = references("wide_window")
    convert_checkpoint(source, tmp_path / "whole")
    monkeypatch.setattr(convert.checkpoint, "SLICE_BYTES", 1000)
    convert_checkpoint(source, tmp_path / "sliced")
    name = "model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "sliced" / name).read_bytes()


def with_dead_weights(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    text = config.text_config
    first = text.num_hidden_layers - text.num_kv_shared_layers
    dead = {
        f"model.language_model.layers.{i}.self_attn.{name}.weight": torch.full(shape, torch.nan)
        for i in range(first, text.num_hidden_layers)
        for name, shape in {
            "k_proj": (text.num_key_value_heads * text.head_dim, text.hidden_size),
            "v_proj": (text.num_key_value_heads * text.head_dim, text.hidden_size),
            "k_norm": (text.head_dim,),
        }.items()
    }
    assert dead and not dead.keys() & tensors.keys()
    return tensors | dead | {"lm_head.weight": tensors["model.language_model.embed_tokens.weight"].clone()}


def older_name(name: str) -> str:
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    return "language_model." + name if name.startswith("lm_head") else name.removeprefix("model.")


def hub_spelling(values: dict) -> dict:
    ropes = values["text_config"].pop("rope_parameters")
    values["text_config"]["rope_theta"] = ropes["full_attention"]["rope_theta"]
    values["text_config"]["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    values["torch_dtype"] = values["text_config"]["torch_dtype"] = values.pop("dtype")
    return values


@pytest.mark.parametrize("source_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("spelling", ["dead", "older", "sharded"])
def test_all_kinds_of_source_give_the_same(references, tmp_path, source_dtype, spelling):
    """One file or many, with dead weights and lm_head or without, names and config of transformers 5 or older."""
    model, source = references("five")
    dtype = getattr(torch, source_dtype)
    tensors = load_file(source / "model.safetensors")
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    values = json.loads((source / "config.json").read_text())
    for kind in ("plain", spelling):
        folder = tmp_path / kind
        folder.mkdir()
        kept = with_dead_weights(tensors, model.config) if kind != "plain" else tensors
        if kind == "older":
            kept, values = {older_name(n): t for n, t in kept.items()}, hub_spelling(values)
        if kind == "sharded":
            names = sorted(kept)
            files = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
            for file, some in files.items():
                save_file({n: kept[n] for n in some}, folder / file, metadata={"format": "pt"})
            weight_map = {n: file for file, some in files.items() for n in some}
            index = {"metadata": {}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
            # Not in the index, so no part of the checkpoint.
            save_file({"model.mine": torch.ones(2)}, folder / "other.safetensors")
        else:
            save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(values))
        convert_checkpoint(folder, tmp_path / f"{kind}-mlx")
    plain, other = read(tmp_path / "plain-mlx"), read(tmp_path / f"{spelling}-mlx")
    assert plain.keys() == other.keys()
    assert all(mx.array_equal(plain[n], other[n]) for n in plain)
    configs = [Config.load(tmp_path / f"{kind}-mlx") for kind in ("plain", spelling)]
    assert configs[0] == configs[1]
    load_model(tmp_path / f"{spelling}-mlx")


def test_the_vision_tower_is_carried_through_to_the_byte(references, tmp_path):
    _, source = references("ten")
    before = load_file(source / "model.safetensors")
    # A type and a layout that nothing else here has.
    before["model.vision_tower.timm_model.odd"] = torch.randn(3, 2, 5).to(torch.float64)
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(before, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    convert_checkpoint(folder, tmp_path / "mlx")
    after = load_file(tmp_path / "mlx" / "model.safetensors")
    vision = {n for n in before if n.startswith("model.vision_tower.")}
    assert len(vision) > 50 and {n.removeprefix("model.") for n in vision} == {
        n for n in after if n.startswith(VISION_TOWER)
    }
    for name in vision:
        a, b = before[name], after[name.removeprefix("model.")]
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_parts_that_are_left_out(references, tmp_path):
    model, source = references("five")
    whole = convert_checkpoint(source, tmp_path / "whole", None, dtype="float32")
    dropped = convert_checkpoint(source, tmp_path / "dropped", None, dtype="float32", drop_vision=True)
    text = convert_checkpoint(source, tmp_path / "text", None, dtype="float32", text_only=True)
    assert (whole.left_out, dropped.left_out) == ((), ("vision_tower",))
    assert text.left_out == ("audio_tower", "embed_audio", "embed_vision", "vision_tower")
    everything = read(tmp_path / "whole")
    assert read(tmp_path / "dropped").keys() == {n for n in everything if not n.startswith(VISION_TOWER)}
    assert read(tmp_path / "text").keys() == {n for n in everything if n.startswith("language_model.")}
    config = Config.load(tmp_path / "text")
    assert config.audio_config is None and config.vision_config is None
    ids = np.random.default_rng(0).integers(10, TEXT_IDS, (2, 23))
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)).logits
    for name in ("dropped", "text"):
        assert worst(load_model(tmp_path / name, dtype=mx.float32)(mx.array(ids)), expected) <= 1e-4


def test_a_text_only_source(references, tmp_path):
    """A `Gemma3nForCausalLM`'s own checkpoint."""
    whole, _ = references("wide_window")
    model = Gemma3nForCausalLM._from_config(whole.config.text_config, attn_implementation="eager").eval()
    prefix = "model.language_model."
    weights = {"model." + n.removeprefix(prefix): t for n, t in whole.state_dict().items() if n.startswith(prefix)}
    model.load_state_dict(weights | {"lm_head.weight": whole.lm_head.weight})
    model.save_pretrained(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "mlx", None, dtype="float32")
    ids = np.random.default_rng(0).integers(10, TEXT_IDS, (2, 23))
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)).logits
    assert worst(load_model(tmp_path / "mlx", dtype=mx.float32)(mx.array(ids)), expected) <= 1e-4


def test_config_says_what_the_weights_are(references, tmp_path):
    _, source = references("wide_window")
    convert_checkpoint(source, tmp_path / "mlx", quantize_audio=True)
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "mlx"))
    quantization = after.pop("quantization")
    assert [quantization.pop(key) for key in ("group_size", "bits", "mode")] == [64, 4, "affine"]
    # The per-layer table's rows are 96 wide, the audio tower's 32, but for what follows a feed-forward's 128.
    stored = read(tmp_path / "mlx")
    narrow = {n.removesuffix(".scales") for n in stored if n.endswith(".scales") and n.startswith("audio_tower.")}
    narrow = {n for n in narrow if not n.endswith(("ffw_layer_2", "input_proj_linear"))}
    assert len(narrow) > 10
    assert quantization.keys() == {"language_model.embed_tokens_per_layer", *narrow}
    assert all(value == {"group_size": 32, "bits": 4, "mode": "affine"} for value in quantization.values())
    assert after.pop("dtype") == "bfloat16" and before.pop("dtype") == "float32"
    for section in ("text_config", "audio_config"):
        for values in (before, after):
            values[section].pop("dtype", None)
    assert before == after


def test_the_other_files_travel_along(references, tmp_path):
    _, source = references("unshared")
    folder = tmp_path / "hf"
    folder.mkdir()
    travel = {"tokenizer.json": b"{}", "tokenizer.model": b"\0\1", "chat_template.jinja": b"{{ x }}", "README.md": b"#"}
    travel |= {"preprocessor_config.json": b"{}", "generation_config.json": b"{}", "LICENSE": b"x"}
    for name, content in travel.items():
        (folder / name).write_bytes(content)
    for name in (".gitattributes", "pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.pth"):
        (folder / name).write_bytes(b"{}")
    for name in (".git", "additional_chat_templates", "runs"):
        (folder / name).mkdir()
        (folder / name / "a.jinja").write_text("a")
    # The Hub's cache is a folder of links.
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    (folder / "config.json").symlink_to(source / "config.json")
    convert_checkpoint(folder, tmp_path / "mlx")
    ours = {"config.json", "model.safetensors", "model.safetensors.index.json", "additional_chat_templates"}
    assert {p.name for p in (tmp_path / "mlx").iterdir()} == ours | travel.keys()
    assert all((tmp_path / "mlx" / name).read_bytes() == content for name, content in travel.items())
    assert not (tmp_path / "mlx" / "config.json").is_symlink()
    index = json.loads((tmp_path / "mlx" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == read(tmp_path / "mlx").keys()


# What is wrong with a source: the change to its tensors or its config, and what the refusal says.
LAYER = "model.language_model.layers.0."


def _without(*names: str):
    return lambda tensors, values: [tensors.pop(name) for name in names]


def _with(**changes: Any):
    return lambda tensors, values: values.update(changes)


def _set(name: str, tensor: torch.Tensor):
    return lambda tensors, values: tensors.update({name: tensor})


def _drop_all_norms(tensors: dict, values: dict) -> None:
    for name in [n for n in tensors if n.endswith("input_layernorm.weight") or n.endswith("norm.weight")]:
        del tensors[name]


WRONG = {
    "missing": (_without(f"{LAYER}mlp.up_proj.weight"), [f"{LAYER}mlp.up_proj.weight is missing"]),
    "audio": (_without("model.embed_audio.embedding.weight"), ["model.embed_audio.embedding.weight is missing"]),
    "unexpected": (_set("model.language_model.extra", torch.ones(2)), ["model.language_model.extra is unexpected"]),
    "shape": (
        _set(f"{LAYER}mlp.up_proj.weight", torch.ones(3, 64)),
        [f"{LAYER}mlp.up_proj.weight is [3, 64], the config says [192, 64]"],
    ),
    "transposed": (
        _set("model.audio_tower.subsample_conv_projection.conv_1.conv.weight", torch.ones(4, 3, 3, 8)),
        ["conv_1.conv.weight is [4, 3, 8, 3], the config says [4, 3, 3, 8]"],
    ),
    "whole numbers": (
        _set(f"{LAYER}altup.correct_output_scale", torch.ones(64, dtype=torch.int32)),
        [f"{LAYER}altup.correct_output_scale is I32, not bfloat16, float16 or float32"],
    ),
    "twice": (
        _set("language_model.model.layers.0.mlp.up_proj.weight", torch.ones(192, 64)),
        ["layers.0.mlp.up_proj.weight is there twice"],
    ),
    "many": (_drop_all_norms, ["is missing; ", " and ", " more"]),
    "another config": (_with(audio_config=None), ["is unexpected; ", " and ", " more"]),
    "untied": (_with(tie_word_embeddings=False), ["config.json: tie_word_embeddings is false"]),
    "another model": (_with(model_type="llama"), ["config.json: model_type is 'llama'"]),
    "another kind": (_with(quantization_config={"quant_method": "gptq"}), ["is quantized already (gptq)"]),
    "mlx": (_with(quantization={"bits": 4, "group_size": 64}), ["is quantized already (mlx)"]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_source_is_refused_before_anything_is_written(references, tmp_path, kind):
    _, source = references("unshared")
    change, words = WRONG[kind]
    tensors, values = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    change(tensors, values)
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError) as error:
        convert_checkpoint(folder, tmp_path / "out" / "mlx")
    message = str(error.value)
    assert str(folder) in message and all(word in message for word in words), message
    assert message.count(";") <= 5
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_ours_is_not_converted_again(references, tmp_path):
    _, source = references("unshared")
    for bits in (4, None):
        convert_checkpoint(source, tmp_path / f"mlx{bits}", bits)
        with pytest.raises(UserError, match=f"{tmp_path}/mlx{bits}/.*(already|an MLX checkpoint's)"):
            convert_checkpoint(tmp_path / f"mlx{bits}", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_places_that_are_refused(references, tmp_path):
    _, source = references("unshared")
    before = sorted(source.iterdir())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for target, words in [
        (source, "lies in the source"),
        (source / "mlx", "lies in the source"),
        (source / ".." / source.name / "mlx", "lies in the source"),
        (tmp_path / "full", "exists already"),
        (tmp_path / "full" / "mine.txt", "exists already"),
    ]:
        with pytest.raises(UserError, match=words):
            convert_checkpoint(source, target)
    assert sorted(source.iterdir()) == before
    for missing in ("no/such/folder", "nobody/has-this-model"):
        with pytest.raises(UserError, match=missing) as error:
            convert_checkpoint(missing, tmp_path / "mlx")
        assert "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]


def test_damaged_sources_are_named(references, tmp_path):
    _, source = references("unshared")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    content = (source / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="no .safetensors files"):
        convert_checkpoint(folder, tmp_path / "mlx")
    (folder / "model.safetensors").write_bytes(content[:-7])
    with pytest.raises(UserError, match=f"{folder}/model.safetensors: .*cut short"):
        convert_checkpoint(folder, tmp_path / "mlx")
    (folder / "model.safetensors").write_bytes(content)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(UserError, match="model-00002-of-00002.safetensors: named in"):
        convert_checkpoint(folder, tmp_path / "mlx")
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with pytest.raises(UserError, match="names a in model.safetensors, which does not hold it"):
        convert_checkpoint(folder, tmp_path / "mlx")


def test_float16_that_overflows_is_named(references, tmp_path):
    _, source = references("unshared")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{LAYER}mlp.up_proj.weight"][3, 4] = 1e5
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(UserError, match="mlp.up_proj.weight does not fit into float16; use --dtype bfloat16"):
        convert_checkpoint(folder, tmp_path / "mlx", dtype="float16")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_the_command(references, tmp_path):
    _, source = references("unshared")
    arguments = ["--hf-path", str(source), "--mlx-path", str(tmp_path / "mlx"), "--q-bits", "8", "--drop-vision"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    first, second = result.output.splitlines()
    assert first == f"{tmp_path / 'mlx'}: 2.8 MB -> 0.5 MB, without vision_tower"
    assert second.startswith("rows that the group size does not divide ") and "stay in bfloat16: " in second
    help = CliRunner().invoke(main, ["--help"]).output
    assert all(f"--{parameter.name.replace('_', '-')}" in help for parameter in main.params)


def test_the_bar_counts_bytes_to_the_end(references, tmp_path, monkeypatch):
    _, source = references("unshared")
    bars = []

    class Bar(convert.checkpoint.tqdm):
        def close(self) -> None:
            bars.append((self.n, self.total, self.unit))
            super().close()

    monkeypatch.setattr(convert.checkpoint, "tqdm", Bar)
    result = convert_checkpoint(source, tmp_path / "mlx")
    assert bars[0] == (result.source_bytes, result.source_bytes, "B")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint that takes a second or more to convert."""
    folder = tmp_path_factory.mktemp("large") / "hf"
    sparse_checkpoint(folder, rows=24_576)
    return folder


def start(source: Path, target: Path, **options: Any) -> subprocess.Popen:
    command = [sys.executable, "-m", "convert.checkpoint", "--hf-path", str(source), "--mlx-path", str(target)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("which, code", [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_interrupted_conversion_leaves_nothing_that_looks_finished(large, tmp_path, which, code):
    process = start(large, tmp_path / "mlx")
    deadline = time.monotonic() + 60
    # In the middle: some of the quantized table is written.
    while not any(f.stat().st_blocks * 512 > 8_000_000 for f in tmp_path.glob(".mlx.partial-*/*.safetensors")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(which)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code and out == ""
    assert "Traceback" not in err
    left = [p.name for p in tmp_path.iterdir()]
    if which == signal.SIGINT:
        assert err.splitlines()[-1] == "error: interrupted" and not left
    else:
        assert len(left) == 1 and left[0].startswith(".mlx.partial-")
        assert not (tmp_path / left[0] / "model.safetensors.index.json").exists()
    # And the next one goes through.
    again = start(large, tmp_path / "mlx")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert out.splitlines()[0].startswith(f"{tmp_path / 'mlx'}: ")
    assert Config.load(tmp_path / "mlx").quantization["bits"] == 4


def test_a_full_disk_is_one_line(large, tmp_path):
    limit = 20_000_000
    process = start(
        large, tmp_path / "mlx", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2 and out == ""
    assert err.splitlines()[-1].startswith("error: ") and err.splitlines()[-1].endswith("File too large")
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """Four times the table, 0.13 and 0.5 GB: the same memory, below 2 GB with interpreter and libraries."""
    small = sparse_checkpoint(tmp_path / "small", rows=8_192)
    large = sparse_checkpoint(tmp_path / "large", rows=32_768)
    peaks = [measure(tmp_path / name, tmp_path / f"{name}-mlx") for name in ("small", "large")]
    assert large == 4 * small
    assert peaks[1]["peak"] < 2e9
    assert peaks[1]["peak"] - peaks[0]["peak"] < 32e6
    assert peaks[1]["mlx_peak"] < 128e6
