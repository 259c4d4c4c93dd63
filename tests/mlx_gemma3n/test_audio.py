"""The audio encoder against transformers' in float32: encodings, masks and gradients of randomised weights."""

from dataclasses import replace
from functools import lru_cache
from typing import Sequence

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nAudioEncoder

from mlx_gemma3n.audio import AudioEncoder, encoded_length
from mlx_gemma3n.config import AudioConfig
from mlx_gemma3n.names import transposition
from tests.reference import AWKWARD, randomize, reference_config, relative, to_torch, worst

# What the four leave at its default: a clamp that cuts, strides in time other than 2 and 2, few mel bins, no context at
# all before a query's own frame, a kernel of one frame.
CLAMPED = dict(
    hidden_size=24,
    conf_num_attention_heads=3,
    gradient_clipping=0.75,
    input_feat_size=37,
    sscp_conv_kernel_size=((3, 3), (4, 2)),
    sscp_conv_stride_size=((2, 2), (3, 1)),
    sscp_conv_group_norm_eps=1e-2,
    conf_attention_chunk_size=4,
    conf_attention_context_left=0,
    conf_attention_context_right=6,
    conf_reduction_factor=3,
    conf_conv_kernel_size=1,
)
CONFIGS = {**{name: parts["audio"] for name, parts in AWKWARD.items()}, "clamped": CLAMPED}

# Lengths of the clips of a batch; the features are as long as the longest, or as `frames`.
BATCHES = [
    *[([n], n) for n in (1, 2, 3, 4, 5, 7, 8, 10)],
    ([96, 96], 96),
    ([131, 64, 7, 1], 131),
    ([90, 0, 33], 101),
    ([0], 20),
]


def audio_config(name: str):
    return reference_config(text={}, audio=CONFIGS[name]).audio_config


@lru_cache(maxsize=None)
def pair(name: str) -> tuple[Gemma3nAudioEncoder, AudioEncoder]:
    """transformers' encoder with random weights, and ours with the same."""
    config = audio_config(name)
    torch.manual_seed(0)
    theirs = randomize(Gemma3nAudioEncoder._from_config(config, attn_implementation="eager").float(), 1).eval()
    ours = AudioEncoder(AudioConfig.from_dict(config.to_dict()))
    ours.load_weights([(n, mx.array(to_our_layout(n, p.detach().numpy()))) for n, p in theirs.named_parameters()])
    return theirs, ours


def to_our_layout(name: str, value: np.ndarray) -> np.ndarray:
    axes = transposition("audio_tower." + name)
    return value.transpose(axes) if axes else value


def batch(bins: int, lengths: Sequence[int], frames: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Noise, on padding too, and the mask that is True on padding."""
    features = np.random.default_rng(seed).normal(0, 2, (len(lengths), frames, bins)).astype(np.float32)
    return features, np.arange(frames)[None] >= np.array(lengths)[:, None]


@pytest.mark.parametrize("name", CONFIGS)
def test_encodings_equal(name: str):
    theirs, ours = pair(name)
    for lengths, frames in BATCHES:
        features, padding = batch(theirs.config.input_feat_size, lengths, frames)
        with torch.no_grad():
            want = theirs(to_torch(features), to_torch(padding))
        got, got_padding = ours(mx.array(features), mx.array(padding))
        assert np.array_equal(np.array(got_padding), want.audio_mel_mask.numpy()), (lengths, frames)
        assert got.shape[1] == encoded_length(ours.config, frames)
        assert worst(got, want.last_hidden_state) <= 1e-4, (lengths, frames)
        assert not np.array(got)[np.array(got_padding)].any()
        # A clip that has frames has an encoding, and one that has none, none.
        assert [bool((~row).any()) for row in np.array(got_padding)] == [n > 0 for n in lengths]


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_may_lie_anywhere(name: str):
    """Before the sound or between two: there alone it would reach valid frames, through the causal convolution."""
    theirs, ours = pair(name)
    features, _ = batch(theirs.config.input_feat_size, [150, 150], 150, seed=5)
    frame = np.arange(150)[None]
    padding = np.concatenate([frame < 61, (frame >= 48) & (frame < 97)])
    with torch.no_grad():
        want = theirs(to_torch(features), to_torch(padding))
    got, got_padding = ours(mx.array(features), mx.array(padding))
    assert np.array_equal(np.array(got_padding), want.audio_mel_mask.numpy())
    assert worst(got, want.last_hidden_state) <= 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal(name: str):
    """Of a random projection of the valid encodings, with respect to every parameter and the features."""
    theirs, ours = pair(name)
    features, padding = batch(theirs.config.input_feat_size, [75, 40, 9], 77, seed=3)

    inputs = to_torch(features).requires_grad_()
    encoded = theirs(inputs, to_torch(padding))
    valid = ~encoded.audio_mel_mask.numpy()[..., None]
    projection = np.random.default_rng(4).normal(size=encoded.last_hidden_state.shape).astype(np.float32) * valid
    theirs.zero_grad()
    (encoded.last_hidden_state * to_torch(projection)).sum().backward()

    def loss(parameters: dict, x: mx.array) -> mx.array:
        ours.update(parameters)
        return (ours(x, mx.array(padding))[0] * mx.array(projection)).sum()

    parameters = ours.parameters()
    gradients, of_features = mx.grad(loss, argnums=(0, 1))(parameters, mx.array(features))
    ours.update(parameters)
    got = dict(tree_flatten(gradients))
    want = {n: to_our_layout(n, p.grad.numpy()) for n, p in theirs.named_parameters()}
    assert got.keys() == want.keys()
    worst_first = sorted(((relative(got[n], want[n]), n) for n in want), reverse=True)
    assert worst_first[0][0] <= 1e-3, worst_first[:5]
    assert relative(of_features, inputs.grad) <= 1e-3


def test_bfloat16_runs_and_stays_finite():
    config = replace(pair("unshared")[1].config, conf_num_hidden_layers=1)
    ours = AudioEncoder(config)
    ours.set_dtype(mx.bfloat16)
    features, padding = (mx.array(x) for x in batch(config.input_feat_size, [40, 11, 0], 40))

    def loss(parameters: dict) -> mx.array:
        ours.update(parameters)
        return ours(features, padding)[0].astype(mx.float32).square().sum()

    parameters = ours.parameters()
    value, gradients = mx.value_and_grad(loss)(parameters)
    ours.update(parameters)
    encodings, _ = ours(features, padding)
    assert encodings.dtype == mx.bfloat16 and all(p.dtype == mx.bfloat16 for _, p in tree_flatten(gradients))
    finite = [mx.isfinite(x).all() for x in (value, encodings, *(p for _, p in tree_flatten(gradients)))]
    assert all(x.item() for x in finite)


@pytest.mark.parametrize("name", CONFIGS)
def test_encoded_length_is_that_of_the_output(name: str):
    """No block changes a length, so none is built; nothing is computed either (torch's meta device, a lazy graph)."""
    config = audio_config(name)
    config.conf_num_hidden_layers = 0
    with torch.device("meta"):
        theirs = Gemma3nAudioEncoder._from_config(config)
    ours = AudioEncoder(AudioConfig.from_dict(config.to_dict()))
    bins = config.input_feat_size
    for frames in range(1, 401):
        want = encoded_length(ours.config, frames)
        encoded = theirs(
            torch.empty((1, frames, bins), device="meta"), torch.empty((1, frames), dtype=torch.bool, device="meta")
        )
        assert encoded.last_hidden_state.shape[1] == want
        encodings, padding = ours(mx.zeros((1, frames, bins)), mx.zeros((1, frames), dtype=mx.bool_))
        assert encodings.shape[1] == padding.shape[1] == want


def test_a_whole_clip_takes_its_placeholders():
    """30 seconds, as the extractor of mel features frames them, are the 188 soft tokens that the processor writes."""
    assert encoded_length(AudioConfig(), 2997) == encoded_length(AudioConfig(), 3000) == 188


@pytest.mark.parametrize("clips, frames, masked", [(1, 0, 0), (0, 40, 40), (1, 40, 37), (1, 40, 44)])
def test_nothing_to_encode_and_masks_of_another_length_are_refused(clips: int, frames: int, masked: int):
    ours = pair("five")[1]
    with pytest.raises(ValueError, match=f"features of shape .*{frames}, 128.* mask of shape .*{masked}"):
        ours(mx.zeros((clips, frames, 128)), mx.zeros((clips, masked), dtype=mx.bool_))


def test_only_transformers_parameters_are_listed():
    theirs, ours = pair("five")
    assert {n for n, _ in tree_flatten(ours.parameters())} == {n for n, _ in theirs.named_parameters()}
