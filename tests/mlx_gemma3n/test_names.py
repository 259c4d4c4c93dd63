"""The table of names against transformers' state dicts and against the live model's parameters."""

import json

import pytest
import torch
from mlx.utils import tree_flatten
from safetensors import safe_open
from transformers import Gemma3nConfig, Gemma3nForCausalLM, Gemma3nForConditionalGeneration

from mlx_gemma3n.config import Config
from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.names import VISION_TOWER, expected_shapes, inverse, is_dead, to_hf, to_mlx, transposition
from tests.reference import AWKWARD, reference_config

OLDER = {"model.language_model.": "language_model.model.", "model.": ""}


@pytest.fixture(scope="module", params=AWKWARD)
def reference(request):
    hf = reference_config(**AWKWARD[request.param])
    with torch.device("meta"):
        shapes = {n: tuple(t.shape) for n, t in _meta(hf).items()}
    return Config.from_dict(json.loads(hf.to_json_string())), shapes


def _meta(config: Gemma3nConfig) -> dict:
    return Gemma3nForConditionalGeneration._from_config(config).state_dict()


def test_every_name_goes_there_and_back(reference):
    _, shapes = reference
    dropped = {name for name in shapes if to_mlx(name) is None}
    assert dropped == {"lm_head.weight"}
    kept = shapes.keys() - dropped
    assert all(to_hf(to_mlx(name)) == name for name in kept)
    assert len({to_mlx(name) for name in kept}) == len(kept)
    # Ours stay as they are.
    assert all(to_mlx(to_mlx(name)) == to_mlx(name) for name in kept)


def test_older_spellings_are_the_same_tensors(reference):
    _, shapes = reference
    for name in shapes.keys() - {"lm_head.weight"}:
        for new, old in OLDER.items():
            if name.startswith(new):
                assert to_mlx(old + name.removeprefix(new)) == to_mlx(name)
                break
    assert to_mlx("language_model.lm_head.weight") is None


def test_shapes_are_transformers_in_our_layout(reference):
    config, shapes = reference
    ours = {}
    for name, shape in shapes.items():
        path = to_mlx(name)
        if path is not None and not path.startswith(VISION_TOWER):
            axes = transposition(path)
            ours[path] = tuple(shape[i] for i in axes) if axes else shape
            if axes:
                assert tuple(ours[path][i] for i in inverse(axes)) == shape
    assert expected_shapes(config) == ours


def test_shapes_are_the_live_models(reference):
    config, _ = reference
    live = {name: tuple(value.shape) for name, value in tree_flatten(Gemma3n(config).parameters())}
    assert expected_shapes(config) == live


def test_text_only_names(tmp_path):
    """A `Gemma3nForCausalLM`'s own file: `model.layers…`."""
    hf = reference_config(**AWKWARD["five"]).text_config
    torch.manual_seed(0)
    model = Gemma3nForCausalLM(hf)
    model.save_pretrained(tmp_path)
    config = Config.load(tmp_path)
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as file:
        names = set(file.keys())
    assert config.audio_config is None and config.vision_config is None
    assert {to_mlx(name) for name in names} - {None} == expected_shapes(config).keys()
    assert all(to_hf(to_mlx(name), text_only=True) == name for name in names if to_mlx(name))


def test_dead_weights_are_those_of_shared_layers(reference):
    config, _ = reference
    text = config.text_config
    for i in range(text.num_hidden_layers):
        for name in ("k_proj", "v_proj", "k_norm"):
            assert is_dead(f"language_model.layers.{i}.self_attn.{name}.weight", text) == text.is_kv_shared(i)
        for name in ("q_proj", "o_proj", "q_norm"):
            assert not is_dead(f"language_model.layers.{i}.self_attn.{name}.weight", text)
    assert not is_dead("audio_tower.conformer.1.attention.attn.k_proj.weight", text)
