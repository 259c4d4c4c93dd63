"""The audio cache beside the tower itself: the same soft tokens, one encoding a clip, no trust in a damaged file."""

import errno
import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import soundfile
from mlx.utils import tree_flatten, tree_map

from mlx_gemma3n import lora
from mlx_gemma3n.audio import AudioEncoder
from mlx_gemma3n.config import UserError
from tests.reference import AUDIO_TOKEN, TEXT_IDS, VISION_IDS, awkward_model, port
from tests.train.small_processor import small_processor
from train.audio_cache import AudioCache, fingerprint
from train.batching import collate
from train.data import load_examples
from train.step import accumulate
from train.trained_audio import TrainedAudio, clips_of

SOFT = 20


@pytest.fixture(scope="module")
def model():
    return port(awkward_model("five"))


@pytest.fixture(scope="module")
def processor():
    return small_processor(AUDIO_TOKEN, 8, TEXT_IDS + VISION_IDS, SOFT, max_samples=24_000)


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """The number of clips in each call of the encoder."""
    calls: list[int] = []
    subsample = AudioEncoder.subsample

    def counting(self, features, padding):
        calls.append(features.shape[0])
        return subsample(self, features, padding)

    monkeypatch.setattr(AudioEncoder, "subsample", counting)
    return calls


@pytest.fixture
def examples(tmp_path, processor):
    """[short], [short, long], [text only], [long], [short] again, [long, long]."""
    rng = np.random.default_rng(0)
    for name, seconds in (("short", 0.4), ("long", 1.4)):
        soundfile.write(tmp_path / f"{name}.wav", rng.normal(0, 0.1, int(seconds * 16_000)), 16_000)
    lines = []
    for clips in (["short"], ["short", "long"], [], ["long"], ["short"], ["long", "long"]):
        content = [{"type": "audio", "audio": f"{c}.wav"} for c in clips] + [{"type": "text", "text": "Say it."}]
        answer = {"role": "assistant", "content": "yes"}
        lines.append(json.dumps({"messages": [{"role": "user", "content": content}, answer]}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    return load_examples(tmp_path / "train.jsonl", processor)


def same(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a, b).item()


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_each_distinct_clip_is_encoded_once_over_epochs_and_runs(tmp_path, model, processor, examples, encoded):
    batch, folder = collate(examples, 0), tmp_path / "cache"
    want = TrainedAudio(clips_of(processor))(model, batch)
    assert encoded == [1] * 7
    encoded.clear()
    cache = AudioCache(folder, model, processor)
    got = cache(model, batch)
    # The short clip beside the long one is padded further, and that is another input of the tower.
    assert encoded == [1] * 3 and (cache.misses, cache.hits) == (3, 4) and len(files(folder)) == 3
    assert got.shape == (7, SOFT, 64) and mx.abs(got - want).max().item() <= 1e-6
    assert same(cache(model, batch), got) and (cache.misses, cache.hits) == (3, 11)
    again = AudioCache(folder, model, processor)
    assert same(again(model, batch), got) and (again.misses, again.hits) == (0, 7)
    assert encoded == [1] * 3


def test_the_cached_soft_tokens_give_the_logits_of_the_clips(tmp_path, model, processor, examples):
    cache = AudioCache(tmp_path / "cache", model, processor)
    example = examples[1]
    features, mask = example.features(processor)
    ids = mx.array(example.input_ids)[None]
    want = model(ids, input_features=mx.array(features), input_features_mask=mx.array(mask))
    for _ in range(2):
        assert mx.abs(model(ids, audio_embeds=cache.soft_tokens(example)) - want).max().item() <= 1e-5


def test_later_epochs_decode_nothing(tmp_path, model, processor, examples, monkeypatch):
    cache = AudioCache(tmp_path / "cache", model, processor)
    first = cache(model, collate(examples, 0))
    monkeypatch.setattr("mlx_gemma3n.processor.load_audio", lambda path: pytest.fail(f"{path} was decoded"))
    assert same(cache(model, collate(examples, 0)), first)


def test_batches_without_clips(tmp_path, model, processor, examples):
    batch = collate([examples[2]], 0)
    assert AudioCache(tmp_path / "cache", model, processor)(model, batch) is None
    assert TrainedAudio(clips_of(processor))(model, batch) is None


def test_equal_rows_at_the_end_are_kept_once(tmp_path, model, processor, examples):
    cache = AudioCache(tmp_path / "cache", model, processor)
    soft = cache.soft_tokens(examples[0])[0]
    (file,) = files(tmp_path / "cache")
    kept = mx.load(str(file))["soft_tokens"]
    # 0.4 s are 40 frames and 5 soft tokens, then the filler.
    assert kept.shape[0] == 6 and same(kept, soft[:6]) and mx.array_equal(soft[5:], mx.repeat(soft[-1:], 15, 0)).item()


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other", "folder"])
def test_a_damaged_file_is_encoded_again(tmp_path, model, processor, examples, encoded, caplog, damage):
    folder = tmp_path / "cache"
    want = AudioCache(folder, model, processor).soft_tokens(examples[0])
    (file,) = files(folder)
    data = file.read_bytes()
    if damage == "folder":
        file.unlink()
        file.mkdir()
        with pytest.raises(UserError, match="cannot be written"):
            AudioCache(folder, model, processor).soft_tokens(examples[0])
        return
    flipped = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    file.write_bytes({"cut": data[:-10], "flipped": flipped, "empty": b"", "other": b"not a tensor" * 9}[damage])
    cache = AudioCache(folder, model, processor)
    assert same(cache.soft_tokens(examples[0]), want)
    assert encoded == [1, 1] and cache.misses == 1
    assert str(file) in caplog.text and "encoded again" in caplog.text
    assert file.read_bytes() == data and files(folder) == [file]


def test_a_file_damaged_during_the_run(tmp_path, model, processor, examples):
    cache = AudioCache(tmp_path / "cache", model, processor)
    want = cache.soft_tokens(examples[5])
    (file,) = files(tmp_path / "cache")
    file.unlink()
    assert same(cache.soft_tokens(examples[5]), want) and (cache.misses, cache.hits) == (2, 2)


def test_other_weights_another_dtype_or_another_clip_are_other_entries(tmp_path, model, processor, examples):
    assert fingerprint(model) == fingerprint(port(awkward_model("five")))
    folder = tmp_path / "cache"
    AudioCache(folder, model, processor).soft_tokens(examples[0])
    half = port(awkward_model("five"))
    half.update(tree_map(lambda w: w.astype(mx.bfloat16), half.parameters()))
    cache = AudioCache(folder, half, processor)
    first = cache.soft_tokens(examples[0])
    assert first.dtype == mx.bfloat16 and cache.misses == 1
    assert same(AudioCache(folder, half, processor).soft_tokens(examples[0]), first)
    other = port(awkward_model("five", seed=1))
    assert (cache := AudioCache(folder, other, processor)).soft_tokens(examples[0]) is not None and cache.misses == 1
    soundfile.write(tmp_path / "short.wav", np.random.default_rng(9).normal(0, 0.1, 6_400), 16_000)
    assert (cache := AudioCache(folder, model, processor)).soft_tokens(examples[0]) is not None and cache.misses == 1
    assert len(files(folder)) == 4


def test_the_text_decoder_has_no_part_in_the_key(model):
    other = port(awkward_model("five"))
    other.language_model.update(tree_map(lambda w: w + 1, other.language_model.parameters()))
    assert fingerprint(other) == fingerprint(model)


def test_no_place_for_the_cache(tmp_path, model, processor, examples, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: no place for the audio cache"):
        AudioCache(tmp_path / "file", model, processor)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = AudioCache(tmp_path / "cache", model, processor)
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\); make room"):
        cache.soft_tokens(examples[0])
    assert files(tmp_path / "cache") == []


def test_adapters_on_the_tower_are_refused_and_get_gradients_without_the_cache(tmp_path, processor, examples):
    model = port(awkward_model("five"))
    lora.attach(model, lora.AdapterConfig(lora.resolve_targets(model, "language")))
    AudioCache(tmp_path / "cache", model, processor)
    lora.detach(model)
    lora.attach(model, lora.AdapterConfig(lora.resolve_targets(model, "language+audio")))
    with pytest.raises(ValueError, match="the audio tower has adapters"):
        AudioCache(tmp_path / "cache", model, processor)
    batch = collate(examples[:2], 0)

    def total(parameters):
        model.update(parameters)
        return TrainedAudio(clips_of(processor))(model, batch).square().sum()

    gradients = dict(tree_flatten(mx.grad(total)(model.trainable_parameters())))
    assert any(g.any().item() for name, g in gradients.items() if name.startswith("audio_tower."))


def test_a_checkpoint_without_an_audio_tower(tmp_path, processor, examples):
    model = port(awkward_model("five"))
    del model["audio_tower"]
    with pytest.raises(UserError, match="train.jsonl:1: a clip for a checkpoint without an audio tower"):
        AudioCache(tmp_path / "cache", model, processor).soft_tokens(examples[0])


def test_a_step_takes_the_cache_whether_it_is_cold_or_warm(tmp_path, processor, examples):
    model = port(awkward_model("five"))
    lora.attach(model, lora.AdapterConfig(lora.resolve_targets(model, "language")))
    cache, batch = AudioCache(tmp_path / "cache", model, processor), collate(examples, 0)
    fresh = accumulate(model, [batch], TrainedAudio(clips_of(processor)))
    for hits in (4, 11):
        loss, tokens, gradients = accumulate(model, [batch], cache)
        assert cache.hits == hits and tokens == fresh[1] == batch.supervised_tokens and abs(loss - fresh[0]) <= 1e-3
        for (name, ours), (_, want) in zip(tree_flatten(gradients), tree_flatten(fresh[2])):
            assert mx.abs(ours - want).max().item() <= 1e-5 * max(1.0, mx.abs(want).max().item()), name
