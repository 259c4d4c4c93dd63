"""What ships as the demo: sizes, licences, nothing held out among the clips to train on, a checkpoint that is whole."""

import hashlib
import json
import re

import numpy as np
import pytest
import soundfile
import torch
from transformers import AutoProcessor, Gemma3nForConditionalGeneration

from mlx_gemma3n.processor import Processor
from train.demo import CHECKPOINT, DATA
from train.demo.clips import WORDS, Clip
from train.demo.tokenizer import TEXT_IDS, make_tokenizer, write_processor

MEGABYTE = 10**6


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def lines(name):
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def clips_of(name):
    """The clip of each example; there is one in each."""
    found = []
    for line in lines(name):
        (clip,) = (part["audio"] for part in line["messages"][0]["content"] if part["type"] == "audio")
        found.append(clip)
    return found


def answers(name):
    return [line["messages"][-1]["content"] for line in lines(name)]


def test_sizes_are_within_their_limits():
    assert size(CHECKPOINT) <= 12 * MEGABYTE
    assert size(DATA) <= 3 * MEGABYTE


def test_every_clip_is_used_and_every_used_clip_is_there():
    used = clips_of("train.jsonl") + clips_of("valid.jsonl")
    assert len(used) == len(set(used))
    assert sorted(used) == sorted(f"clips/{path.name}" for path in (DATA / "clips").iterdir())


def test_every_clip_has_a_licence():
    text = "\n".join(path.read_text(encoding="utf-8") for path in DATA.glob("LICENSE*"))
    clips = clips_of("train.jsonl") + clips_of("valid.jsonl")
    voices = {re.fullmatch(r"clips/.+-(\w+)\.flac", clip)[1] for clip in clips}
    for voice in voices:
        (line,) = (line for line in text.splitlines() if f"*-{voice}.flac" in line)
        licence = re.search(r"CC (BY(?:-SA)?) 3\.0", line)
        assert licence and "Copyright" in line
        assert f"https://creativecommons.org/licenses/{licence[1].lower()}/3.0/" in text
        assert f"-{voice}-wav" in text


def test_no_held_out_recording_is_trained_on():
    """Neither by name nor, a copy under another name, by its samples."""
    sounds = {}
    for name in ("train.jsonl", "valid.jsonl"):
        waves = [soundfile.read(DATA / clip, dtype="int16")[0] for clip in clips_of(name)]
        sounds[name] = {hashlib.sha256(wave.tobytes()).hexdigest() for wave in waves}
        assert len(sounds[name]) == len(waves)
    assert not sounds["train.jsonl"] & sounds["valid.jsonl"]


def test_every_held_out_answer_is_trained_and_all_differ():
    """So a right answer on a held-out clip takes hearing it: knowing the answers alone gives 1 in their number."""
    held_out = answers("valid.jsonl")
    assert len(set(held_out)) == len(held_out)
    assert set(held_out) <= set(answers("train.jsonl"))


def test_the_base_was_never_trained_on_held_out_clips():
    """`build.py` trains on the clips that `Clip.held_out` leaves; the data files must be cut by the same rule."""
    for name, held_out in (("train.jsonl", False), ("valid.jsonl", True)):
        for path in clips_of(name):
            letter, voice = re.fullmatch(r"clips/(\w)-(\w+)\.flac", path).groups()
            clip = Clip(letter, voice, np.zeros(0, np.float32))
            assert f"clips/{clip.name}" == path
            assert clip.held_out is held_out


@pytest.fixture(scope="module")
def reference():
    model, info = Gemma3nForConditionalGeneration.from_pretrained(
        CHECKPOINT, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def test_every_part_of_gemma_3n_is_in_the_checkpoint(reference):
    text = reference.config.text_config
    assert text.num_kv_shared_layers > 0 and text.altup_num_inputs == 4 and max(text.activation_sparsity_pattern) > 0
    assert set(text.layer_types) == {"sliding_attention", "full_attention"}
    assert reference.model.vision_tower is not None and reference.model.audio_tower is not None
    assert all(torch.isfinite(p).all() for p in reference.parameters())


def test_weights_divide_into_groups(reference):
    """Of 64, the conversion's default, and of 32 for what is as narrow as the per-layer inputs."""
    text = reference.config.text_config
    widths = text.intermediate_size if isinstance(text.intermediate_size, list) else [text.intermediate_size]
    rows = [text.hidden_size, text.num_attention_heads * text.head_dim, text.laurel_rank, *widths]
    assert [width for width in rows if width % 64] == []
    assert text.hidden_size_per_layer_input % 32 == 0


def written(model, processor, messages):
    """Whether greedy decoding answers `messages` as they do: each token of the answer is the likeliest."""
    example = processor(messages, root=DATA)
    inputs = {
        name: torch.from_numpy(value)[None] if name == "input_ids" else torch.from_numpy(value)
        for name, value in vars(example).items()
        if name != "labels"
    }
    with torch.no_grad():
        choice = model(**inputs).logits[0, :-1].argmax(-1).numpy()
    labels = example.labels[1:]
    return bool(((choice == labels) | (labels == -100)).all())


def test_the_base_hears_the_words_and_does_not_know_the_answers(reference):
    """Else the demo would teach hearing, or nothing."""
    processor = Processor.from_pretrained(CHECKPOINT)
    heard = known = 0
    for line, clip in zip(lines("train.jsonl"), clips_of("train.jsonl")):
        word = WORDS[re.fullmatch(r"clips/(\w)-\w+\.flac", clip)[1]]
        user, answer = line["messages"]
        assert word in answer["content"]
        heard += written(reference, processor, [user, {"role": "assistant", "content": word}])
        known += written(reference, processor, [user, answer])
    assert heard >= 0.9 * len(lines("train.jsonl"))
    assert known == 0


def test_processors_agree_on_a_clip(reference):
    """Transformers' own processor loads the files, and ours makes the same ids, features and masks from them."""
    ours, theirs = Processor.from_pretrained(CHECKPOINT), AutoProcessor.from_pretrained(CHECKPOINT)
    assert theirs.audio_seq_length == reference.config.audio_soft_tokens_per_image
    messages = lines("valid.jsonl")[0]["messages"]
    wave = soundfile.read(DATA / clips_of("valid.jsonl")[0], dtype="float32")[0]
    example = ours(messages, root=DATA)
    batch = theirs(text=theirs.apply_chat_template(messages), audio=[wave], return_tensors="np")
    assert np.array_equal(batch["input_ids"][0], example.input_ids)
    assert np.array_equal(batch["input_features"], example.input_features)
    assert np.array_equal(batch["input_features_mask"].astype(bool), example.input_features_mask)


def test_every_clip_fits_its_placeholders():
    processor = Processor.from_pretrained(CHECKPOINT)
    for clip in clips_of("train.jsonl") + clips_of("valid.jsonl"):
        info = soundfile.info(DATA / clip)
        assert (info.samplerate, info.channels) == (16_000, 1)
        assert info.frames <= processor.max_samples


def test_the_processor_files_are_what_the_code_writes(tmp_path):
    """The shipped files are what `write_processor` writes now."""
    soft_tokens = json.loads((CHECKPOINT / "processor_config.json").read_text(encoding="utf-8"))["audio_seq_length"]
    write_processor(tmp_path, soft_tokens)
    for path in tmp_path.iterdir():
        assert (CHECKPOINT / path.name).read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), path.name


@pytest.mark.parametrize(
    "text",
    [
        "plain words.",
        "  spaces \t tabs \r\n and lines \n",
        "¿Qué? naïve Ünïcode",
        "привет мир",
        "日本語",
        "\U0001f600\u200d▁",
        "<0x41> <unused7> \x00\x7f",
    ],
)
def test_any_text_comes_back(text):
    tokenizer = make_tokenizer()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert max(ids) < TEXT_IDS and tokenizer.unk_token_id not in ids
