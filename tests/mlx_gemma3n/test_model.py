"""Logits against transformers in float32 with eager attention, without a cache and with one."""

import mlx.core as mx
import numpy as np
import pytest
import torch

from tests.reference import AUDIO_TOKEN, AWKWARD, TEXT_IDS, VOCABULARY, awkward_model, mixed_batch, port, worst

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=AWKWARD)
def pair(request):
    model = awkward_model(request.param)
    return model, port(model)


def reference_logits(model, **inputs) -> np.ndarray:
    with torch.no_grad():
        return model(**inputs).logits.numpy()


def test_text_logits(pair):
    theirs, ours = pair
    ids = np.random.default_rng(0).integers(0, TEXT_IDS, (2, 40))
    # Ids of the vision and audio vocabularies have embeddings of their own; only placeholders need a clip.
    ids[0, 3:7] = [TEXT_IDS, TEXT_IDS + 5, AUDIO_TOKEN - 1, VOCABULARY - 1]
    want = reference_logits(theirs, input_ids=torch.from_numpy(ids))
    assert worst(ours(mx.array(ids)), want) <= TOLERANCE


def test_logits_of_a_mixed_batch(pair):
    theirs, ours = pair
    batch = mixed_batch(theirs.config)
    want = reference_logits(theirs, **batch.torch())
    real = batch.attention_mask.astype(bool)
    assert worst(np.array(ours(**batch.mlx()))[real], want[real]) <= TOLERANCE


def test_right_padding_changes_nothing(pair):
    _, ours = pair
    ids = mx.array(np.random.default_rng(1).integers(10, TEXT_IDS, (1, 23)))
    padded = mx.concatenate([ids, mx.zeros((1, 9), dtype=ids.dtype)], axis=1)
    mask = mx.array([[1] * 23 + [0] * 9])
    assert worst(ours(padded, attention_mask=mask)[:, :23], ours(ids)) <= TOLERANCE
    assert np.isfinite(np.array(ours(padded, attention_mask=mask))).all()


@pytest.mark.parametrize("piece", [1, 3, 16])
def test_cache_filled_piece_by_piece_gives_the_logits_of_no_cache(pair, piece):
    theirs, ours = pair
    ids = np.random.default_rng(2).integers(10, TEXT_IDS, (2, 40))
    want = reference_logits(theirs, input_ids=torch.from_numpy(ids))
    cache = ours.make_cache()
    got = [ours(mx.array(ids[:, i : i + piece]), cache=cache) for i in range(0, ids.shape[1], piece)]
    assert worst(mx.concatenate(got, axis=1), want) <= TOLERANCE
    assert worst(ours(mx.array(ids), cache=ours.make_cache()), want) <= TOLERANCE


def test_cache_with_audio_in_the_prefix(pair):
    theirs, ours = pair
    batch = mixed_batch(theirs.config)
    clips, last = 2, int(batch.attention_mask[2].sum())
    ids = batch.input_ids[2:3, :last]
    features = dict(input_features=batch.input_features[1:], input_features_mask=batch.input_features_mask[1:])
    want = reference_logits(
        theirs, input_ids=torch.from_numpy(ids), **{k: torch.from_numpy(v) for k, v in features.items()}
    )
    prefix = last - 6
    assert (ids[0, :prefix] == AUDIO_TOKEN).sum() == clips * theirs.config.audio_soft_tokens_per_image
    cache = ours.make_cache()
    got = [ours(mx.array(ids[:, :prefix]), cache=cache, **{k: mx.array(v) for k, v in features.items()})]
    got += [ours(mx.array(ids[:, i : i + 1]), cache=cache) for i in range(prefix, last)]
    assert worst(mx.concatenate(got, axis=1), want) <= TOLERANCE


def test_a_cache_of_right_padded_rows_keeps_the_mask(pair):
    _, ours = pair
    ids = np.random.default_rng(3).integers(10, TEXT_IDS, (1, 24))
    mask = np.array([[1] * 9 + [0] * 3 + [1] * 12])
    want = ours(mx.array(ids), attention_mask=mx.array(mask))
    cache = ours.make_cache()
    got = [
        ours(mx.array(ids[:, i : i + 4]), attention_mask=mx.array(mask[:, : i + 4]), cache=cache)
        for i in range(0, 24, 4)
    ]
    real = mask.astype(bool)
    assert worst(np.array(mx.concatenate(got, axis=1))[real], np.array(want)[real]) <= TOLERANCE


def test_placeholders_and_soft_tokens_must_match(pair):
    theirs, ours = pair
    batch = mixed_batch(theirs.config).mlx()
    batch["input_features"], batch["input_features_mask"] = (
        batch["input_features"][:2],
        batch["input_features_mask"][:2],
    )
    with pytest.raises(ValueError, match="placeholders"):
        ours(**batch)


def test_clips_longer_than_the_placeholders_are_refused(pair):
    theirs, ours = pair
    frames = (theirs.config.audio_soft_tokens_per_image + 1) * 4 * theirs.config.audio_config.conf_reduction_factor
    with pytest.raises(ValueError, match="soft tokens"):
        ours.encode_audio(mx.zeros((1, frames, 128)), mx.ones((1, frames), dtype=mx.bool_))


def test_bfloat16_stays_close_and_finite(pair):
    theirs, ours = pair
    batch = mixed_batch(theirs.config)
    half = port(theirs)
    half.set_dtype(mx.bfloat16)
    logits = half(**batch.mlx())
    assert logits.dtype == mx.float32
    real = batch.attention_mask.astype(bool)
    difference = np.array(logits)[real] - np.array(ours(**batch.mlx()))[real]
    assert np.isfinite(difference).all() and np.abs(difference).mean() < 0.1
