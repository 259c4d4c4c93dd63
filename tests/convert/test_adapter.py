"""Adapters out to PEFT and back: the same logits there, the same bits on return, and what is refused."""

import copy
import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import mlx.core as mx
import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3nForCausalLM

from convert.adapter import IDLE, READ, REFUSED, from_hf, main, push, read_peft, to_hf
from convert.checkpoint import convert
from mlx_gemma3n import lora
from mlx_gemma3n.cli import run as run_command
from mlx_gemma3n.config import UserError
from mlx_gemma3n.loading import load_model
from tests.convert.test_checkpoint import dequantized
from tests.reference import awkward_model, mixed_batch, port, save_reference, worst

ROOT = Path(__file__).parents[2]
LANGUAGE = r".*language_model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"


@pytest.fixture(scope="module")
def reference():
    return awkward_model("five")


@pytest.fixture(scope="module")
def four_bit(reference, tmp_path_factory):
    """A 4-bit conversion, and transformers with its weights dequantized."""
    folder = tmp_path_factory.mktemp("base")
    convert(save_reference(reference, folder / "hf"), folder / "mlx")
    weights = dequantized(folder / "mlx")
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"]
    theirs = copy.deepcopy(reference)
    theirs.load_state_dict(weights, strict=True)
    return folder / "mlx", theirs


def randomised(model, config: lora.AdapterConfig):
    lora.attach(model, config)
    mx.random.seed(1)
    weights = {n: 0.1 * mx.random.normal(w.shape) for n, w in lora.adapter_weights(model).items()}
    lora.load_weights(model, config, weights, "random")
    return model


def logits(model, batch) -> tuple[np.ndarray, np.ndarray]:
    """Of the real tokens of a mixed batch, and of its text row alone; `model` of transformers or ours."""
    real, ids = batch.attention_mask.astype(bool), batch.input_ids[1:2, :17]
    if isinstance(model, torch.nn.Module):
        with torch.no_grad():
            return model(**batch.torch()).logits.numpy()[real], model(input_ids=torch.from_numpy(ids)).logits.numpy()
    return np.array(model(**batch.mlx()))[real], np.array(model(mx.array(ids)))


def load_with_peft(model, folder, caplog):
    """`PeftModel.from_pretrained`, where a warning is a failure."""
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        # Between peft and transformers, whatever is loaded.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        wrapped = peft.PeftModel.from_pretrained(copy.deepcopy(model), str(folder))
    assert not caplog.records
    return wrapped.eval()


def adapted(wrapped) -> set[str]:
    """The modules to which PEFT gave an adapter."""
    return {n.removeprefix("base_model.model.") for n, m in wrapped.named_modules() if hasattr(m, "lora_A")}


@pytest.mark.parametrize("preset", ["language", "language+audio"])
def test_peft_loads_the_export_and_gives_our_logits(reference, four_bit, tmp_path, caplog, preset):
    base, theirs = four_bit
    ours = load_model(base, mx.float32)
    targets = lora.resolve_targets(ours, preset)
    config = lora.AdapterConfig(
        targets, r=4, lora_alpha=6.0, rank_pattern={targets[3]: 2}, alpha_pattern={targets[5]: 9.0}
    )
    randomised(ours, config)
    lora.save_adapter(tmp_path / "ours", config, lora.adapter_weights(ours))
    to_hf(tmp_path / "ours", tmp_path / "peft")

    wrapped = load_with_peft(theirs, tmp_path / "peft", caplog)
    assert adapted(wrapped) == {f"model.{path}" for path in targets}
    # PEFT is silent about tensors that it has no place for.
    exported = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert exported.keys() == peft.get_peft_model_state_dict(wrapped).keys()
    batch = mixed_batch(reference.config)
    for mine, want, bare in zip(logits(ours, batch), logits(wrapped, batch), logits(theirs, batch)):
        assert worst(mine, want) <= 1e-3
        assert worst(mine, bare) > 0.05


def test_layer_1_is_not_layer_11(tmp_path, caplog):
    """Nor the audio tower's q_proj the text's."""
    model = awkward_model("ten")
    ours = port(model)
    targets = ("language_model.layers.1.self_attn.q_proj", "language_model.layers.11.mlp.up_proj")
    config = lora.AdapterConfig(targets, r=3, rank_pattern={targets[0]: 2}, alpha_pattern={targets[1]: 1.5})
    lora.save_adapter(tmp_path / "ours", config, lora.adapter_weights(randomised(ours, config)))
    to_hf(tmp_path / "ours", tmp_path / "peft")
    wrapped = load_with_peft(model, tmp_path / "peft", caplog)
    assert adapted(wrapped) == {f"model.{path}" for path in targets}
    ids = np.random.default_rng(0).integers(10, 400, (2, 19))
    assert worst(text_logits(ours, ids), text_logits(wrapped, ids)) <= 1e-4


MADE = {
    "list": dict(target_modules=["q_proj", "up_proj"]),
    "regex": dict(target_modules=LANGUAGE, use_rslora=True, lora_alpha=3),
    "all-linear": dict(target_modules="all-linear"),
    "patterns": dict(
        target_modules=LANGUAGE,
        rank_pattern={r"layers\.[02]\.mlp\.up_proj": 3, "down_proj": 2},
        # Of two that match, the first counts.
        alpha_pattern={"gate_proj": 9, r"layers\.1\.mlp\.(gate|up)_proj": 2.5, "q_proj": 11},
    ),
}


def made_by_peft(model, folder, dtype=torch.float32, **options):
    """An adapter that PEFT saved, A and B random and not zero, and the model with it."""
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **options}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_((0.1 * torch.randn(parameter.shape, generator=generator)).to(dtype))
                parameter.data = parameter.data.to(dtype)
    wrapped.save_pretrained(folder)
    return wrapped.float().eval()


@pytest.mark.parametrize("kind", MADE)
def test_adapters_that_peft_made(reference, tmp_path, caplog, kind):
    wrapped = made_by_peft(reference, tmp_path / "peft", **MADE[kind])
    from_hf(tmp_path / "peft", tmp_path / "ours")
    ours = port(reference)
    config, weights = lora.read_adapter(tmp_path / "ours")
    lora.attach(ours, config)
    lora.load_weights(ours, config, weights, "ours")
    batch = mixed_batch(reference.config)
    for mine, want in zip(logits(ours, batch), logits(wrapped, batch)):
        assert worst(mine, want) <= 1e-4
    to_hf(tmp_path / "ours", tmp_path / "again")
    for mine, want in zip(logits(load_with_peft(reference, tmp_path / "again", caplog), batch), logits(wrapped, batch)):
        assert worst(mine, want) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MADE)
def test_there_and_back_gives_the_bits_back(reference, tmp_path, kind, dtype):
    made_by_peft(reference, tmp_path / "peft", dtype, **MADE[kind])
    from_hf(tmp_path / "peft", tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "again")
    before, after = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("peft", "again"))
    assert before.keys() == after.keys()
    assert all(after[n].dtype == dtype and torch.equal(after[n], before[n]) for n in before)
    kept = ("r", "lora_alpha", "use_rslora", "lora_dropout", "bias", "peft_type", "base_model_name_or_path")
    old, new = (json.loads((tmp_path / n / "adapter_config.json").read_text()) for n in ("peft", "again"))
    assert {k: old[k] for k in kept} == {k: new[k] for k in kept}
    modules = [{k.removeprefix("base_model.model.").rpartition(".lora_")[0] for k in t} for t in (before, after)]
    assert modules[0] == modules[1] == set(new["target_modules"])


@pytest.fixture(scope="module")
def text_only(reference):
    """A `Gemma3nForCausalLM` with the reference's weights."""
    model = Gemma3nForCausalLM._from_config(reference.config.text_config, attn_implementation="eager").eval()
    prefix = "model.language_model."
    weights = {"model." + n.removeprefix(prefix): t for n, t in reference.state_dict().items() if n.startswith(prefix)}
    model.load_state_dict(weights | {"lm_head.weight": reference.lm_head.weight})
    return model


def text_logits(model, ids: np.ndarray) -> np.ndarray:
    if isinstance(model, torch.nn.Module):
        with torch.no_grad():
            return model(input_ids=torch.from_numpy(ids)).logits.numpy()
    return np.array(model(mx.array(ids)))


def test_a_text_only_models_adapter_goes_back_to_one(reference, text_only, tmp_path, caplog):
    options = dict(target_modules=["q_proj", "o_proj"], rank_pattern={"o_proj": 2})
    wrapped = made_by_peft(text_only, tmp_path / "peft", **options)
    from_hf(tmp_path / "peft", tmp_path / "ours")
    config, weights = lora.read_adapter(tmp_path / "ours")
    assert all(path.startswith("language_model.layers.") for path in config.target_modules)
    ours = lora.attach(port(reference), config)
    lora.load_weights(ours, config, weights, "ours")
    ids = np.random.default_rng(0).integers(10, 400, (2, 19))
    assert worst(text_logits(ours, ids), text_logits(wrapped, ids)) <= 1e-4
    to_hf(tmp_path / "ours", tmp_path / "again")
    before, after = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("peft", "again"))
    assert before.keys() == after.keys() and all(torch.equal(after[n], before[n]) for n in before)
    again = load_with_peft(text_only, tmp_path / "again", caplog)
    assert adapted(again) == adapted(wrapped)
    assert worst(text_logits(again, ids), text_logits(wrapped, ids)) == 0
    assert "Gemma3nForCausalLM.from_pretrained" in (tmp_path / "again" / "README.md").read_text()


def test_the_base_says_what_it_is_where_it_is_there(text_only, four_bit, tmp_path, caplog):
    """Trained here on a text-only base, or on a whole one."""
    text_only.save_pretrained(tmp_path / "text")
    for base, prefix in ((tmp_path / "text", "model.layers."), (four_bit[0], "model.language_model.layers.")):
        ours = load_model(base, mx.float32)
        targets = lora.resolve_targets(ours, "language")
        config = lora.AdapterConfig(targets, r=2, base_model_name_or_path=str(base))
        folder = tmp_path / prefix
        lora.save_adapter(folder / "ours", config, lora.adapter_weights(randomised(ours, config)))
        to_hf(folder / "ours", folder / "peft")
        exported = json.loads((folder / "peft" / "adapter_config.json").read_text())
        assert all(name.startswith(prefix) for name in exported["target_modules"])
    wrapped = load_with_peft(text_only, tmp_path / "model.layers." / "peft", caplog)
    assert len(adapted(wrapped)) == len(targets)


def older(name: str) -> str:
    return name.replace("model.model.language_model.", "model.language_model.model.")


def renamed(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(path).items()}, path)


def test_the_older_order_of_names_is_read(reference, tmp_path):
    made_by_peft(reference, tmp_path / "peft", target_modules=LANGUAGE)
    new = read_peft(tmp_path / "peft")
    renamed(tmp_path / "peft", older)
    old = read_peft(tmp_path / "peft")
    assert old[0] == new[0] and old[1].keys() == new[1].keys()
    assert all(mx.array_equal(old[1][n], new[1][n]) for n in new[1])


def add_pair(folder: Path, module: str, zero: bool, in_size: int = 64, out_size: int = 32) -> None:
    """One more adapter in PEFT's file, of rank 4."""
    path = folder / "adapter_model.safetensors"
    b = torch.zeros(out_size, 4) if zero else torch.ones(out_size, 4)
    pair = {"A": torch.ones(4, in_size), "B": b}
    more = {f"base_model.model.{module}.lora_{half}.weight": tensor for half, tensor in pair.items()}
    save_file(load_file(path) | more, path)


def test_what_nothing_reads_is_left_out_where_it_is_zero(reference, four_bit, tmp_path):
    """The vision tower's, and keys and values of KV-shared layers, which older transformers had and never trained."""
    base = four_bit[0]
    made_by_peft(reference, tmp_path / "peft", target_modules=["q_proj"])
    dead, vision = "model.language_model.layers.7.self_attn.k_proj", "model.vision_tower.timm_model.fc"
    add_pair(tmp_path / "peft", vision, zero=True)
    add_pair(tmp_path / "peft", dead, zero=True)
    said = from_hf(tmp_path / "peft", tmp_path / "ours", base)
    assert set(said.dropped) == {dead, vision} and str(said).count("\n") == 1 and dead in str(said)
    config, _ = lora.read_adapter(tmp_path / "ours")
    assert {p.rpartition(".")[2] for p in config.target_modules} == {"q_proj"}
    # The trainer's way.
    modules = lora.linear_modules(lora.attach(load_model(base), config))
    assert read_peft(tmp_path / "peft", modules)[0] == config
    for module, words in ((dead, "layers.7.self_attn.k_proj: .*shares the keys"), (vision, "vision tower takes no")):
        add_pair(tmp_path / "peft", module, zero=False)
        with pytest.raises(UserError, match=words):
            from_hf(tmp_path / "peft", tmp_path / "other", base)
        add_pair(tmp_path / "peft", module, zero=True)
    assert not (tmp_path / "other").exists()


def test_an_adapter_for_another_base_is_refused(reference, four_bit, tmp_path):
    base = four_bit[0]
    made_by_peft(reference, tmp_path / "peft", target_modules=["q_proj"])
    from_hf(tmp_path / "peft", tmp_path / "fits", base)
    add_pair(tmp_path / "peft", "model.language_model.layers.3.mlp.up_proj", zero=False, out_size=250)
    with pytest.raises(UserError, match=r"lora_B of model.*layers.3.mlp.up_proj is \[250, 4\], .* needs \[256, 4\]"):
        from_hf(tmp_path / "peft", tmp_path / "ours", base)
    add_pair(tmp_path / "peft", "model.language_model.layers.33.mlp.up_proj", zero=True)
    with pytest.raises(UserError, match="no linear module model.language_model.layers.33.mlp.up_proj; .*another base"):
        from_hf(tmp_path / "peft", tmp_path / "ours", base)
    with pytest.raises(UserError, match="nowhere"):
        from_hf(tmp_path / "peft", tmp_path / "ours", tmp_path / "nowhere")
    assert not (tmp_path / "ours").exists()


def test_every_field_of_pefts_config_is_known():
    """A new one of theirs may change what an adapter computes; until someone has looked, it is refused."""
    fields = {field for field in peft.LoraConfig(r=4, target_modules=["q_proj"]).to_dict()}
    assert not fields - (READ | IDLE | REFUSED.keys())


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(use_dora=True), "use_dora.*DoRA"),
        (dict(modules_to_save=["norm"]), "modules_to_save"),
        (dict(bias="all"), "bias is 'all'"),
        (dict(lora_bias=True), "lora_bias"),
        (dict(trainable_token_indices=[1]), "trainable_token_indices"),
        (dict(target_parameters=["x"]), "target_parameters"),
        (dict(layer_replication=[[0, 1]]), "layer_replication"),
        (dict(alora_invocation_tokens=[5, 6]), "alora_invocation_tokens"),
        (dict(use_bdlora={"nblocks": 2}), "use_bdlora"),
        (dict(kasa_config={"beta": 1}), "kasa_config"),
        (dict(monteclora_config={"num_samples": 1}), "monteclora_config"),
        *[
            (dict(init_lora_weights=start), f"init_lora_weights is '{start}'")
            for start in ("pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga")
        ],
        (dict(peft_type="IA3"), "peft_type is 'IA3'"),
        (dict(peft_type=None), "peft_type is None"),
        (dict(a_new_one=True), "a_new_one is true; it is not known here"),
        (dict(r="4"), 'r "4" is not a whole number'),
        (dict(lora_alpha=None), "lora_alpha null is not a number"),
        (dict(lora_dropout=1.5), "adapter_config.json: lora_dropout 1.5"),
        (dict(alpha_pattern=[1]), r"alpha_pattern is \[1\], not an object"),
        (dict(alpha_pattern={"q_proj": "2"}), 'lora_alpha "2" is not a number'),
        (dict(r=5), "has rank 4, adapter_config.json says 5"),
        (dict(rank_pattern={"(": 2}), "no regular expression"),
        (dict(format="mlx-gemma3n-lora"), "our format already"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(reference, tmp_path, change, message):
    made_by_peft(reference, tmp_path / "peft", target_modules=["q_proj"])
    path = tmp_path / "peft" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message) as error:
        from_hf(tmp_path / "peft", tmp_path / "ours")
    assert str(path) in str(error.value) or "r" in change
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal"])
def test_starts_that_leave_the_base_alone_are_read(reference, tmp_path, start):
    made_by_peft(reference, tmp_path / "peft", target_modules=["q_proj"], init_lora_weights=start)
    from_hf(tmp_path / "peft", tmp_path / "ours")


KEY = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(KEY), "lora_B alone"),
        (lambda t: t.update({KEY: torch.zeros(3, 64)}), "do not belong together"),
        (lambda t: t.update({"base_model.model.x.lora_embedding_A": torch.zeros(3, 3)}), "adapter of an embedding"),
        (lambda t: t.update({KEY.replace("A.weight", "magnitude_vector"): torch.zeros(3)}), "cannot be represented"),
        (
            lambda t: t.update(
                {f"base_model.model.model.vision_tower.fc.lora_{x}.weight": torch.ones(4, 4) for x in "AB"}
            ),
            "vision tower",
        ),
        (
            lambda t: t.update({f"base_model.model.lm_head.lora_{x}.weight": torch.ones(4, 4) for x in "AB"}),
            "lm_head: .*token table",
        ),
        (
            lambda t: t.update({older(k): t[k].clone() for k in list(t)}),
            "twice, under another name",
        ),
        (lambda t: t.update({KEY.replace(".weight", ".default.weight"): t[KEY].clone()}), "is there twice"),
        (lambda t: t.update({KEY: t[KEY].int()}), "q_proj.lora_A.weight is I32"),
        (lambda t: t.clear(), "no adapter tensors"),
    ],
)
def test_tensors_that_are_no_pairs_are_refused(reference, tmp_path, change, message):
    made_by_peft(reference, tmp_path / "peft", target_modules=["q_proj"])
    path = tmp_path / "peft" / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path / "peft", tmp_path / "ours")


def test_modules_that_the_model_lacks_are_named(reference, tmp_path):
    made_by_peft(reference, tmp_path / "peft", target_modules=["q_proj"])
    modules = {m: linear for m, linear in lora.linear_modules(port(reference)).items() if ".layers.4." not in m}
    with pytest.raises(UserError, match="no linear module .*layers.4.*another base"):
        read_peft(tmp_path / "peft", modules)


def command(capsys, *args) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    with pytest.raises(SystemExit) as end:
        run_command(main, [str(arg) for arg in args])
    return end.value.code or 0, *capsys.readouterr()


def test_the_commands(reference, tmp_path, capsys):
    made_by_peft(reference, tmp_path / "peft", target_modules=["q_proj"])
    capsys.readouterr()
    count = len(load_file(tmp_path / "peft" / "adapter_model.safetensors")) // 2
    there = ("from-hf", "--adapter", tmp_path / "peft", "--output", tmp_path / "ours")
    back = ("to-hf", "--adapter", tmp_path / "ours", "--output", tmp_path / "again")
    for args, name, kind in ((there, "ours", "mlx-gemma3n"), (back, "again", "PEFT")):
        code, out, err = command(capsys, *args)
        assert (code, err) == (0, "") and out == f"{tmp_path / name}: {kind} adapter of {count} modules\n"
        code, out, err = command(capsys, *args)
        assert (code, out) == (2, "") and err.startswith(f"error: {tmp_path / name}: exists already")
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert {file.name for file in (tmp_path / "again").iterdir()} == names
    wrong = [
        ("to-hf", "--adapter", tmp_path / "peft", "--output", tmp_path / "x"),
        ("from-hf", "--adapter", tmp_path / "ours", "--output", tmp_path / "x"),
        ("from-hf", "--adapter", tmp_path / "nowhere", "--output", tmp_path / "x"),
        ("to-hf", "--adapter", tmp_path / "nowhere", "--output", tmp_path / "x"),
        ("to-hf", "--adapter", tmp_path / "ours", "--output", tmp_path / "x", "--push-to-hub", "no-owner"),
        ("to-hf", "--output", tmp_path / "x"),
        ("sideways",),
    ]
    for args in wrong:
        code, out, err = command(capsys, *args)
        assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, err
    assert not (tmp_path / "x").exists()


def test_damaged_files_are_one_line(reference, tmp_path, capsys):
    made_by_peft(reference, tmp_path / "peft", target_modules=["q_proj"])
    from_hf(tmp_path / "peft", tmp_path / "ours")
    capsys.readouterr()
    for name, direction in (("peft", "from-hf"), ("ours", "to-hf")):
        folder = tmp_path / name
        weights, config = next(folder.glob("*.safetensors")), folder / "adapter_config.json"
        whole = weights.read_bytes()
        damages = [
            (weights, whole[:-100], "cut short" if name == "peft" else "incomplete"),
            (weights, whole[:30], ""),
            (weights, b"", ""),
            (weights, None, ""),
            (config, b"{", "cannot be read as JSON"),
            (config, b"[]", ""),
            (config, b"\xff\xfe", "cannot be read as JSON"),
            (config, None, "no such file"),
        ]
        for file, content, words in damages:
            before = file.read_bytes()
            file.unlink() if content is None else file.write_bytes(content)
            code, out, err = command(capsys, direction, "--adapter", folder, "--output", tmp_path / "x")
            assert (code, out) == (2, "") and err.count("\n") == 1, err
            assert err.startswith(f"error: {file}") and words in err, err
            file.write_bytes(before)
    (tmp_path / "peft" / "adapter_model.safetensors").rename(tmp_path / "peft" / "adapter_model.bin")
    code, _, err = command(capsys, "from-hf", "--adapter", tmp_path / "peft", "--output", tmp_path / "x")
    assert code == 2 and "adapter_model.bin is not read" in err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: w.pop(next(n for n in w if n.endswith("lora_b"))), "lora_b missing"),
        (lambda w: w.update({"language_model.norm.lora_a": mx.zeros((3, 3))}), "model.norm.lora_a is unexpected"),
        (lambda w: w.update({next(iter(w)): mx.zeros((3,))}), "is unexpected"),
        (lambda w: w.update({n: mx.zeros((64, 5)) for n in w if n.endswith(".lora_a")}), "says rank 4"),
    ],
)
def test_an_adapter_of_ours_that_is_not_whole_is_refused(reference, tmp_path, change, message):
    made_by_peft(reference, tmp_path / "peft", target_modules=["q_proj"])
    config, weights = read_peft(tmp_path / "peft")
    change(weights)
    lora.save_adapter(tmp_path / "ours", config, weights)
    with pytest.raises(UserError, match=message):
        to_hf(tmp_path / "ours", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_the_card_says_what_the_run_says(reference, tmp_path):
    ours = port(reference)
    targets = lora.resolve_targets(ours, "language")
    config = lora.AdapterConfig(targets, r=4, base_model_name_or_path="google/gemma-3n-E2B-it")
    run = tmp_path / "run"
    weights = lora.adapter_weights(lora.attach(ours, config))
    lora.save_adapter(run / "checkpoints" / "step-000005", config, weights)
    weights = {name: tensor + 1 for name, tensor in weights.items()}
    for folder in ("checkpoints/step-000009", "adapter"):
        lora.save_adapter(run / folder, config, weights)
    to_hf(run, tmp_path / "bare")
    bare = (tmp_path / "bare" / "README.md").read_text()
    for word in ("Data:", "Settings:", "steps", "| measure |"):
        assert word not in bare

    (run / "data.json").write_text(json.dumps({"train_examples": 988, "valid_examples": 12, "clips": 1000}))
    (run / "config.yaml").write_text("learning_rate: 0.0002\nseed: 3\ndata: /home/me/secret\n")
    rows = [
        {"step": 0, "epoch": 0.0, "valid_loss": 4.5, "valid_exact_match": 0.0},
        {"step": 1, "epoch": 0.1, "loss": 3.0},
        {"step": 5, "epoch": 1.0, "loss": 0.25},
        {"step": 5, "epoch": 1.0, "valid_loss": 0.5, "valid_exact_match": 0.75},
        {"step": 9, "epoch": 2.0, "loss": None},
        {"step": 9, "epoch": 2.0, "valid_loss": 0.125, "valid_exact_match": 1.0},
        # After the last save, before the kill.
        {"step": 10, "epoch": 2.1, "loss": 77.0},
    ]
    # A run that is killed may leave the last line half written.
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 11, "lo')
    cards = {}
    for adapter, output in ((run, "a"), (run / "adapter", "b"), (run / "checkpoints" / "step-000005", "c")):
        to_hf(adapter, tmp_path / output)
        cards[output] = (tmp_path / output / "README.md").read_text()
        assert cards[output].startswith("---\nbase_model: google/gemma-3n-E2B-it\nlibrary_name: peft\n")
        assert "- Data: 988 training examples, 12 validation examples, 1000 clips\n" in cards[output]
        assert "- Settings: learning_rate 0.0002, seed 3\n" in cards[output]
        assert f"- {len(targets)} modules of language_model: down_proj, gate_proj, k_proj, " in cards[output]
        assert "| training loss | 3.0000 (step 1) | 0.2500 (step 5) |" in cards[output]
        assert "secret" not in cards[output]
    assert cards["a"] == cards["b"]
    assert "- 9 steps, 2 epochs\n" in cards["a"] and "- 5 steps, 1 epochs\n" in cards["c"]
    assert "| validation exact match | 0.0000 (step 0) | 1.0000 (step 9) |" in cards["a"]
    # The checkpoint was measured before the run went on.
    assert "| validation exact match | 0.0000 (step 0) | 0.7500 (step 5) |" in cards["c"]
    with pytest.raises(UserError, match="exists already"):
        to_hf(run, tmp_path / "a")


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as an upload of small files asks for. `server.refuse` maps a path's part to a status."""

    def do_GET(self) -> None:
        self.answer(404, {"error": "not found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        for part, status in self.server.refuse.items():
            if part in self.path:
                return self.answer(status, {"error": "says the Hub"})
        address = f"http://127.0.0.1:{self.server.server_port}/you/coach"
        if self.path == "/api/repos/create":
            self.answer(200, {"url": address, "id": "you/coach", "name": "you/coach"})
        elif self.path.endswith("/preupload/main"):
            kind = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": file["path"], **kind} for file in json.loads(body)["files"]]
            self.answer(200, {"files": files})
        elif "/commit/main" in self.path:
            self.answer(200, {"success": True, "commitOid": "a" * 40, "commitUrl": f"{address}/commit/{'a' * 40}"})
        else:
            self.answer(200, {"errors": [], "warnings": []})

    def answer(self, status: int, values: dict) -> None:
        body = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.refuse = [], {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def push_process(port: int, adapter: Path, output: Path) -> subprocess.CompletedProcess:
    """The command in a process of its own, whose Hub is at `port`."""
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_TOKEN": "hf_of_a_test"}
    environment["HF_HOME"] = str(output.parent)
    args = ["to-hf", "--adapter", str(adapter), "--output", str(output), "--push-to-hub", "you/coach"]
    return subprocess.run(
        [sys.executable, "-m", "convert.adapter", *args],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_pushing_sends_the_folder(reference, hub, tmp_path):
    made_by_peft(reference, tmp_path / "peft", target_modules=["q_proj"])
    from_hf(tmp_path / "peft", tmp_path / "ours")
    result = push_process(hub.server_port, tmp_path / "ours", tmp_path / "again")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"http://127.0.0.1:{hub.server_port}/you/coach"
    assert all(token == "Bearer hf_of_a_test" for _, token, _ in hub.asked)
    create = next(json.loads(body) for path, _, body in hub.asked if path == "/api/repos/create")
    assert (create["organization"], create["name"]) == ("you", "coach")
    lines = next(body for path, _, body in hub.asked if "/commit/main" in path).splitlines()
    sent = {line["value"]["path"] for line in map(json.loads, lines) if line["key"] == "file"}
    assert sent == {file.name for file in (tmp_path / "again").iterdir()} >= {"adapter_model.safetensors", "README.md"}


@pytest.mark.parametrize("part, status", [("/repos/create", 401), ("/commit/main", 403), ("", None)])
def test_a_failed_push_is_one_line_and_leaves_the_folder(reference, hub, tmp_path, part, status):
    made_by_peft(reference, tmp_path / "peft", target_modules=["q_proj"])
    from_hf(tmp_path / "peft", tmp_path / "ours")
    if status is None:
        hub.server_close()
    else:
        hub.refuse[part] = status
    result = push_process(hub.server_port, tmp_path / "ours", tmp_path / "again")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: you/coach: not uploaded (")
    assert line.endswith(f"hf upload you/coach {tmp_path}/again")
    assert status is None or str(status) in line
    assert len(list((tmp_path / "again").iterdir())) == 3


def test_pushing_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_no_such_token")
    with pytest.raises(UserError, match="you/coach: not uploaded .*is whole"):
        push(tmp_path, "you/coach")
