"""Adapters out to PEFT and back: the same logits there, the same bits on return, and what is refused."""

import copy
import json
import logging
import warnings

import mlx.core as mx
import numpy as np
import peft
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from convert.adapter import from_hf, main, push, read_peft, to_hf
from convert.checkpoint import convert
from mlx_gemma3n import lora
from mlx_gemma3n.config import UserError
from mlx_gemma3n.loading import load_model
from tests.convert.test_checkpoint import dequantized
from tests.reference import awkward_model, mixed_batch, port, save_reference, worst

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


@pytest.mark.parametrize("preset", ["language", "language+audio"])
def test_peft_loads_the_export_and_gives_our_logits(reference, four_bit, tmp_path, caplog, preset):
    base, theirs = four_bit
    ours = load_model(base, mx.float32)
    targets = lora.resolve_targets(ours, preset)
    config = lora.AdapterConfig(targets, r=4, lora_alpha=6.0, rank_pattern={targets[3]: 2}, alpha_pattern={targets[5]: 9.0})
    randomised(ours, config)
    lora.save_adapter(tmp_path / "ours", config, lora.adapter_weights(ours))
    to_hf(tmp_path / "ours", tmp_path / "peft")

    wrapped = load_with_peft(theirs, tmp_path / "peft", caplog)
    adapted = {n.removeprefix("base_model.model.model.") for n, m in wrapped.named_modules() if hasattr(m, "lora_A")}
    assert adapted == set(targets)
    batch = mixed_batch(reference.config)
    for mine, want, bare in zip(logits(ours, batch), logits(wrapped, batch), logits(theirs, batch)):
        assert worst(mine, want) <= 1e-3
        assert worst(mine, bare) > 0.05


MADE = {
    "list": dict(target_modules=["q_proj", "up_proj"]),
    "regex": dict(target_modules=LANGUAGE, use_rslora=True, lora_alpha=3),
    "all-linear": dict(target_modules="all-linear"),
    "patterns": dict(
        target_modules=LANGUAGE,
        rank_pattern={r"layers\.[02]\.mlp\.up_proj": 3, "down_proj": 2},
        alpha_pattern={"q_proj": 11, r"layers\.1\.mlp\.gate_proj": 2.5},
    ),
}


def made_by_peft(model, folder, dtype=torch.float32, **options):
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
    kept = ("r", "lora_alpha", "use_rslora", "lora_dropout", "bias", "peft_type")
    old, new = (json.loads((tmp_path / n / "adapter_config.json").read_text()) for n in ("peft", "again"))
    assert {k: old[k] for k in kept} == {k: new[k] for k in kept}


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
        (dict(init_lora_weights="pissa_niter_4"), "init_lora_weights"),
        (dict(peft_type="IA3"), "peft_type is 'IA3'"),
        (dict(r=5), "has rank 4, adapter_config.json says 5"),
        (dict(rank_pattern={"(": 2}), "no regular expression"),
        (dict(format="mlx-gemma3n-lora"), "our format already"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(reference, tmp_path, change, message):
    made_by_peft(reference, tmp_path / "peft", target_modules=["q_proj"])
    path = tmp_path / "peft" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path / "peft", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


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
                {
                    f"base_model.model.model.vision_tower.fc.lora_{x}.weight": torch.zeros(4, 4)
                    for x in "AB"
                }
            ),
            "vision tower",
        ),
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
    with pytest.raises(UserError, match="no linear module .*layers.4.*another base"):
        read_peft(tmp_path / "peft", [m for m in lora.linear_modules(port(reference)) if ".layers.4." not in m])


def test_damaged_files_are_one_line(reference, tmp_path):
    runner = CliRunner()
    made_by_peft(reference, tmp_path / "peft", target_modules=["q_proj"])
    weights = tmp_path / "peft" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    arguments = ["from-hf", "--adapter", str(tmp_path / "peft"), "--output", str(tmp_path / "ours")]
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        runner.invoke(main, arguments, catch_exceptions=False)
    weights.unlink()
    with pytest.raises(UserError, match="no such file"):
        runner.invoke(main, arguments, catch_exceptions=False)


def test_the_card_says_what_the_run_says(reference, tmp_path):
    ours = port(reference)
    config = lora.AdapterConfig(lora.resolve_targets(ours, "language"), r=4, base_model_name_or_path="google/gemma-3n-E2B-it")
    run = tmp_path / "run"
    lora.save_adapter(run / "adapter", config, lora.adapter_weights(lora.attach(ours, config)))
    to_hf(run, tmp_path / "bare")
    assert "Trained on" not in (tmp_path / "bare" / "README.md").read_text()
    (run / "data.json").write_text(json.dumps({"train_examples": 988, "valid_examples": 12, "clips": 1000}))
    rows = [{"step": 5, "epoch": 2.0, "loss": 0.25}, {"step": 5, "epoch": 2, "valid_loss": 0.5, "valid_exact_match": 0.75}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    for adapter, output in ((run, "a"), (run / "adapter", "b")):
        to_hf(adapter, tmp_path / output)
        card = (tmp_path / output / "README.md").read_text()
        assert card.startswith("---\nbase_model: google/gemma-3n-E2B-it\nlibrary_name: peft\n")
        assert "Trained on 988 examples, evaluated on 12; 1000 clips" in card
        assert "| validation exact match | 0.7500 |" in card
    with pytest.raises(UserError, match="exists already"):
        to_hf(run, tmp_path / "a")


def test_pushing(tmp_path, monkeypatch):
    """The Hub's client up to the network, which is not there; then what it is asked for."""
    (tmp_path / "README.md").write_text("x")
    monkeypatch.setenv("HF_TOKEN", "hf_no_such_token")
    with pytest.raises(UserError, match="you/coach: not uploaded .*is whole"):
        push(tmp_path, "you/coach")
    from huggingface_hub import HfApi

    asked = []
    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo, **o: asked.append(repo) or f"hub/{repo}")
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **o: asked.append((o["repo_id"], o["folder_path"])))
    assert push(tmp_path, "you/coach") == "hub/you/coach"
    assert asked == ["you/coach", ("you/coach", str(tmp_path))]
