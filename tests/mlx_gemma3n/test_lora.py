"""Which modules take adapters, and adapter folders: written, read, refused. Gradients are in
tests/train/test_step.py."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_gemma3n import lora
from mlx_gemma3n.config import UserError
from tests.reference import TEXT_IDS, awkward_model, port


@pytest.fixture(scope="module")
def reference():
    return awkward_model("five")


@pytest.fixture
def model(reference):
    return port(reference)


IDS = mx.array(np.random.default_rng(0).integers(10, TEXT_IDS, (1, 12)))


def randomised(model, config, seed=1):
    mx.random.seed(seed)
    weights = {n: 0.2 * mx.random.normal(w.shape) for n, w in lora.adapter_weights(lora.attach(model, config)).items()}
    lora.load_weights(model, config, weights, "random")
    return weights


def test_the_language_preset_spares_dead_projections_and_the_audio_tower(model):
    targets = lora.resolve_targets(model, "language")
    assert all(t.startswith("language_model.layers.") for t in targets)
    # 9 layers, 5 of them without keys and values of their own.
    assert len(targets) == 9 * 7 - 5 * 2
    assert not any(t.endswith(("k_proj", "v_proj")) and int(t.split(".")[2]) >= 4 for t in targets)


def test_a_bare_name_is_the_decoders_and_audio_tower_says_so(model):
    assert all(t.startswith("language_model.") for t in lora.resolve_targets(model, ["q_proj"]))
    audio = lora.resolve_targets(model, ["audio_tower.q_proj"])
    assert audio == tuple(f"audio_tower.conformer.{i}.attention.attn.q_proj" for i in range(2))
    full = "language_model.layers.3.mlp.up_proj"
    assert lora.resolve_targets(model, [full]) == (full,)


@pytest.mark.parametrize(
    "name, message",
    [
        ("proj_q", "there are .*q_proj"),
        ("audio_tower.nothing", "audio_tower.ffw_layer_1"),
        ("vision_tower.timm_model.fc", "vision tower"),
        ("embed_tokens", "an embedding"),
        ("language_model.layers.7.self_attn.k_proj", "shares the keys and values"),
    ],
)
def test_names_that_mean_nothing_are_refused(model, name, message):
    with pytest.raises(UserError, match=message):
        lora.resolve_targets(model, [name])


def test_a_fresh_adapter_changes_nothing_and_detaching_takes_it_off(model):
    before = model(IDS)
    config = lora.AdapterConfig(lora.resolve_targets(model, "language+audio"), r=3)
    lora.attach(model, config)
    assert (model(IDS) == before).all()
    with pytest.raises(UserError, match="has an adapter already"):
        lora.attach(model, config)
    weights = lora.adapter_weights(model)
    lora.load_weights(model, config, {n: mx.ones_like(w) for n, w in weights.items()}, "ones")
    assert not (model(IDS) == before).all()
    assert (lora.detach(model)(IDS) == before).all()
    assert not lora.adapter_weights(model)


def test_a_saved_adapter_gives_the_same_logits(model, reference, tmp_path):
    path = "language_model.layers.2.mlp.up_proj"
    config = lora.AdapterConfig(
        lora.resolve_targets(model, "language"), r=4, use_rslora=True, rank_pattern={path: 2}, alpha_pattern={path: 7.0}
    )
    weights = randomised(model, config)
    lora.save_adapter(tmp_path / "adapter", config, lora.adapter_weights(model))
    read, tensors = lora.read_adapter(tmp_path)  # a run folder: its adapter/ is found
    assert read == config
    assert tensors.keys() == weights.keys() and all((tensors[n] == w).all() for n, w in weights.items())
    assert tensors[f"{path}.lora_a"].shape == (64, 2)
    other = port(reference)
    lora.attach(other, read)
    lora.load_weights(other, read, tensors, tmp_path)
    assert (other(IDS) == model(IDS)).all()


def test_saving_replaces_whole(model, tmp_path):
    config = lora.AdapterConfig(("language_model.layers.0.mlp.up_proj",), r=2)
    randomised(model, config)
    lora.save_adapter(tmp_path / "adapter", config, lora.adapter_weights(model))
    (tmp_path / "adapter" / "stray").touch()
    lora.save_adapter(tmp_path / "adapter", config, lora.adapter_weights(model))
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == ["adapter_config.json", "adapters.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_only_adapters_are_trainable(model):
    lora.attach(model, lora.AdapterConfig(lora.resolve_targets(model, "language"), r=2))
    names = [name for name, _ in tree_flatten(model.trainable_parameters())]
    assert names and all(name.endswith(("lora_a", "lora_b")) for name in names)
    assert all(w.dtype == mx.float32 for w in lora.adapter_weights(model).values())


def test_wrong_adapters_are_refused_by_name(model, tmp_path):
    config = lora.AdapterConfig(("language_model.layers.0.mlp.up_proj",), r=2)
    randomised(model, config)
    weights = lora.adapter_weights(model)
    lora.save_adapter(tmp_path, config, weights) if not any(tmp_path.iterdir()) else None
    with pytest.raises(UserError, match="no such file; is .* an adapter or a run folder"):
        lora.read_adapter(tmp_path / "nowhere")
    name = "language_model.layers.0.mlp.up_proj.lora_a"
    with pytest.raises(UserError, match="up_proj.lora_a is missing"):
        lora.load_weights(model, config, {n: w for n, w in weights.items() if n != name}, "x")
    with pytest.raises(UserError, match=r"up_proj.lora_a is \[64, 3\], the model needs \[64, 2\]"):
        lora.load_weights(model, config, {**weights, name: mx.zeros((64, 3))}, "x")
    path = tmp_path / lora.CONFIG
    values = json.loads(path.read_text())
    for change, message in (
        ({"peft_type": "LORA"}, "a PEFT adapter; convert it first: python -m convert.adapter from-hf"),
        ({"format": "other"}, "not an adapter of mlx-gemma3n"),
        ({"format_version": 2}, "format_version 2"),
        ({"r": 0}, "rank 0"),
    ):
        path.write_text(json.dumps({**values, **change}))
        with pytest.raises(UserError, match=message):
            lora.read_adapter(tmp_path)
