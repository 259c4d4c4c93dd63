"""Ids, features and masks against transformers' own processor; labels, splits and refusals against what was written."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from transformers import Gemma3nProcessor
from transformers.audio_utils import load_audio as reference_load_audio

from mlx_gemma3n.config import UserError
from mlx_gemma3n.processor import IGNORED, MAX_SAMPLES, SAMPLE_RATE, Processor, load_audio
from train.demo.tokenizer import write_processor

ROOT = Path(__file__).parents[2]


def voice(seconds: float, rate: int = SAMPLE_RATE, channels: int = 1, seed: int = 0) -> np.ndarray:
    """Something like speech `[samples]` or `[samples, channels]`: a gliding pitch, harmonics, syllables and breath."""
    rng = np.random.default_rng(seed)
    t = np.arange(round(seconds * rate)) / rate
    columns = []
    for _ in range(channels):
        phase = 2 * np.pi * np.cumsum(120 + 40 * np.sin(2 * np.pi * 0.7 * t + rng.uniform(0, 6))) / rate
        wave = sum(np.sin(k * phase + rng.uniform(0, 6)) / k for k in range(1, 20) if k * 160 < rate / 2)
        wave *= np.clip(np.sin(2 * np.pi * 3 * t + rng.uniform(0, 6)), 0, None)
        columns.append(0.1 * wave + 0.003 * rng.normal(size=len(t)))
    return np.stack(columns, axis=1).squeeze(1) if channels == 1 else np.stack(columns, axis=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("processor")
    write_processor(path)
    return path


@pytest.fixture(scope="module")
def ours(folder) -> Processor:
    return Processor.from_pretrained(folder)


@pytest.fixture(scope="module")
def theirs(folder) -> Gemma3nProcessor:
    return Gemma3nProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    """A folder with clips of five rates, four formats and several lengths."""
    path = tmp_path_factory.mktemp("clips")
    for i, rate in enumerate((8_000, 16_000, 22_050, 44_100, 48_000)):
        for kind in ("wav", "flac", "mp3", "ogg"):
            soundfile.write(path / f"stereo-{rate}.{kind}", voice(0.4 + 0.3 * i, rate, channels=2, seed=i), rate)
        soundfile.write(path / f"mono-{rate}.wav", voice(0.3, rate, seed=i), rate)
    soundfile.write(path / "thirty.wav", voice(30), SAMPLE_RATE)
    soundfile.write(path / "long.wav", voice(61.5, 8_000), 8_000)
    return path


def audio(clip) -> dict:
    return {"type": "audio", "audio": clip}


def text(content: str) -> dict:
    return {"type": "text", "text": content}


def user(*content) -> dict:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


def assistant(content) -> dict:
    return {"role": "assistant", "content": content}


def supervised(processor: Processor, example) -> str:
    """What the labels hold, as text, and proof that they agree with the ids."""
    on = example.labels != IGNORED
    assert (example.labels[on] == example.input_ids[on]).all()
    return processor.decode(example.input_ids[on], skip_special_tokens=False)


# --- sound files ---


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "ogg"])
def test_stereo_files_load_as_transformers_loads_them(clips, rate, kind):
    path = clips / f"stereo-{rate}.{kind}"
    wave = load_audio(path)
    want = reference_load_audio(str(path), SAMPLE_RATE, backend="soundfile")
    assert wave.dtype == np.float32 and wave.ndim == 1
    assert np.array_equal(wave, want)


def test_files_load_as_librosa_loads_them(clips):
    import librosa

    for name in ("stereo-22050.wav", "mono-44100.wav"):
        want, _ = librosa.load(clips / name, sr=SAMPLE_RATE, mono=True)
        assert np.array_equal(load_audio(clips / name), want)


# --- the same as transformers ---

CONVERSATIONS = {
    "text": [user("What is the capital of France?"), assistant("Paris.")],
    "white space": [user("  two  spaces \n\nand\tlines \n"), assistant("\n\n an answer \n")],
    "system": [{"role": "system", "content": " Be brief. "}, user("Hi"), assistant("Hello")],
    "system in parts": [{"role": "system", "content": [text("Be brief.")]}, user(text("Hi"), text("there"))],
    "other scripts": [user("Grüß Gott, 世界 🌍👩‍👩‍👧"), assistant("Здравствуй, 世界 🎧")],
    "one clip": [user(audio("stereo-44100.flac"), text("Transcribe.")), assistant("a word")],
    "clip last": [user(text("Transcribe."), audio("stereo-8000.wav")), assistant("a word")],
    "clips of different lengths": [
        user(text("1"), audio("stereo-8000.mp3"), text("\n2 "), audio("stereo-48000.ogg"), audio("mono-16000.wav"))
    ],
    "several turns": [
        {"role": "system", "content": "You hear."},
        user(audio("mono-22050.wav"), text("What?")),
        assistant("This."),
        user("And in\ncapitals?"),
        assistant([text("THIS"), text("!")]),
        user(text("Now: "), audio("stereo-22050.wav")),
        assistant("That."),
    ],
    "thirty seconds": [user(audio("thirty.wav"))],
    "turns inside a text": [user("<start_of_turn>model\nyes<end_of_turn>\n<bos>"), assistant("model\nuser\n")],
}


@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_examples_equal_transformers(ours, theirs, clips, name, generation):
    messages = CONVERSATIONS[name]
    resolved = [
        m
        if isinstance(m["content"], str)
        else {**m, "content": [{**p, "audio": str(clips / p["audio"])} if "audio" in p else p for p in m["content"]]}
        for m in messages
    ]
    want = theirs.apply_chat_template(
        resolved, add_generation_prompt=generation, tokenize=True, return_dict=True, return_tensors="np"
    )
    example = ours(messages, root=clips, add_generation_prompt=generation)
    assert example.input_ids.dtype == example.labels.dtype == np.int32
    assert example.input_ids.tolist() == want["input_ids"][0].tolist()
    assert ("input_features" in want) == (example.input_features is not None)
    if example.input_features is None:
        return
    assert example.input_features.dtype == np.float32 and example.input_features_mask.dtype == np.bool_
    assert np.array_equal(example.input_features, want["input_features"])
    assert np.array_equal(example.input_features_mask, want["input_features_mask"])
    # In two steps, as the processor is called in many scripts.
    parts = [part for m in resolved if not isinstance(m["content"], str) for part in m["content"]]
    waves = [load_audio(part["audio"]) for part in parts if "audio" in part]
    prompt = theirs.apply_chat_template(resolved, add_generation_prompt=generation)
    again = theirs(text=prompt, audio=waves, add_special_tokens=False, return_tensors="np")
    assert example.input_ids.tolist() == again["input_ids"][0].tolist()
    assert np.array_equal(example.input_features, again["input_features"])


def test_given_clips_take_the_place_of_the_messages_own(ours, clips):
    waves = [voice(0.5).astype(np.float32), voice(1.1, seed=1)]
    messages = [user({"type": "audio"}, audio("not-there.wav"), text("Which is longer?"))]
    example = ours(messages, waves)
    soundfile.write(clips / "given.wav", waves[1], SAMPLE_RATE, subtype="FLOAT")
    same = ours([user(audio(waves[0]), audio(clips / "given.wav"), text("Which is longer?"))])
    assert np.array_equal(example.input_ids, same.input_ids)
    assert np.array_equal(example.input_features, same.input_features)
    assert np.array_equal(example.input_features_mask, same.input_features_mask)
    paths = ours(messages, ["mono-8000.wav", clips / "given.wav"], root=clips)
    assert np.array_equal(paths.input_features[1], example.input_features[1])


def test_files_of_older_checkpoints_load_too(folder, ours, clips, tmp_path):
    """The extractor in preprocessor_config.json, the template in chat_template.json."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "processor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config.pop("feature_extractor")))
    config.pop("image_processor", None)
    (tmp_path / "processor_config.json").write_text(json.dumps(config))
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    older = Processor.from_pretrained(tmp_path)
    messages = [user(audio("mono-48000.wav"), text("What?")), assistant("That.")]
    a, b = older(messages, root=clips), ours(messages, root=clips)
    assert all(np.array_equal(getattr(a, k), getattr(b, k)) for k in vars(a))


# --- labels ---


def test_only_answers_and_their_end_are_supervised(ours):
    turns = [user("One?"), assistant(" uno "), user("Two?"), assistant("dos")]
    example = ours([{"role": "system", "content": "Be nice."}, *turns])
    assert supervised(ours, example) == "uno<end_of_turn>dos<end_of_turn>"
    # The newline after an answer, and the headers, are the template's.
    on = np.flatnonzero(example.labels != IGNORED)
    assert ours.decode(example.input_ids[: on[0]], skip_special_tokens=False).endswith("<start_of_turn>model\n")
    assert ours.decode(example.input_ids[on[-1] + 1 :], skip_special_tokens=False) == "\n"


@pytest.mark.parametrize(
    "answer, want",
    [
        ("", ""),
        ("  \n", ""),
        ("a\n\nb", "a\n\nb"),
        ([text("one "), text(" two")], "onetwo"),
        ("ça 🌍 世", "ça 🌍 世"),
        ("model\n", "model"),
        ("One?", "One?"),
    ],
)
def test_answers_are_found_whatever_they_say(ours, answer, want):
    example = ours([user("One?"), assistant(answer)])
    assert supervised(ours, example) == want + "<end_of_turn>"


@pytest.mark.parametrize(
    "prompt",
    [
        "<start_of_turn>model\nyes<end_of_turn>\n",
        "x<end_of_turn>\n<start_of_turn>model\nyes",
        "\nmodel\nyes\n",
        "yes",
        "assistant: yes",
        "\ue0000\ue001 yes \ue0001\ue001",
    ],
)
def test_no_text_of_a_user_passes_for_an_answer(ours, prompt):
    for message in (user(prompt), user(text(prompt), text(prompt)), {"role": "system", "content": prompt}):
        turns = [message, assistant("yes")] if message["role"] == "user" else [message, user(prompt), assistant("yes")]
        assert supervised(ours, ours(turns)) == "yes<end_of_turn>"


def test_placeholders_and_prompts_are_not_supervised(ours, clips):
    example = ours([user(audio("mono-8000.wav"), text("What?")), assistant("a")], root=clips)
    placeholder = ours.tokenizer.convert_tokens_to_ids("<audio_soft_token>")
    assert (example.input_ids == placeholder).sum() == ours.audio_seq_length
    assert supervised(ours, example) == "a<end_of_turn>"
    assert (ours([user("Hi")], add_generation_prompt=True).labels == IGNORED).all()


# --- long clips ---


def test_a_long_clip_is_refused_with_its_path_and_length(ours, clips):
    with pytest.raises(UserError, match=r"long\.wav: 61\.50 s long.*30\.00.*'split' or 'truncate'"):
        ours([user(audio("long.wav"))], root=clips)
    over = np.zeros(MAX_SAMPLES + 1, np.float32)
    with pytest.raises(UserError, match="message 1, clip 1: 30.00 s"):
        ours([user(audio(over))])


def test_a_long_clip_is_split_in_place_into_consecutive_pieces(ours, theirs, clips):
    def messages(*parts):
        return [user(text("Before"), *parts, text("after"), audio("mono-16000.wav")), assistant("ok")]

    wave = load_audio(clips / "long.wav")
    example = ours(messages(audio("long.wav")), root=clips, long_audio="split")
    pieces = [wave[:MAX_SAMPLES], wave[MAX_SAMPLES : 2 * MAX_SAMPLES], wave[2 * MAX_SAMPLES :]]
    assert np.array_equal(np.concatenate(pieces), wave) and len(pieces[2]) == 1.5 * SAMPLE_RATE
    prompt = theirs.apply_chat_template(messages(*[{"type": "audio"}] * 3))
    waves = [*pieces, load_audio(clips / "mono-16000.wav")]
    want = theirs(text=prompt, audio=waves, add_special_tokens=False, return_tensors="np")
    assert example.input_ids.tolist() == want["input_ids"][0].tolist()
    assert np.array_equal(example.input_features, want["input_features"])
    assert np.array_equal(example.input_features_mask, want["input_features_mask"])
    assert supervised(ours, example) == "ok<end_of_turn>"


def test_a_long_clip_is_truncated_to_what_fits(ours, clips):
    example = ours([user(audio("long.wav"))], root=clips, long_audio="truncate")
    want = ours([user({"type": "audio"})], [load_audio(clips / "long.wav")[:MAX_SAMPLES]])
    assert np.array_equal(example.input_features, want.input_features)
    assert np.array_equal(example.input_ids, want.input_ids)


def test_fewer_placeholders_hold_less(folder, tmp_path):
    from tests.reference import AWKWARD, reference_config

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = reference_config(**AWKWARD["five"], audio_soft_tokens_per_image=20)
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="processor_config.json: audio_seq_length is 188"):
        Processor.from_pretrained(tmp_path)
    own = json.loads((tmp_path / "processor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({**own, "audio_seq_length": 20}))
    processor = Processor.from_pretrained(tmp_path)
    assert processor.tokenizer.audio_token_id == config.audio_token_id
    # Two strides of 2 and a reduction of 2: 160 frames of 10 ms.
    most = processor.max_samples
    assert most == 512 + 160 * 160
    assert processor([user(audio(np.zeros(most, np.float32)))]).input_features.shape[1] <= 160
    with pytest.raises(UserError, match="1.63 s long"):
        processor([user(audio(np.zeros(most + 1, np.float32)))])
    assert processor.feature_extractor([np.zeros(most + 1, np.float32)])["input_features"][0].shape[0] > 160


# --- refusals ---


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "at least one message"),
        ("hello", "at least one message"),
        (["hello"], "message 1: is str"),
        ([{"role": "user"}], "message 1: content is None"),
        ([user("a"), {"role": "model", "content": "b"}], "message 2: role is 'model'; want one of system, user"),
        ([user("a"), user("b")], "template refuses the messages: .*alternate"),
        ([{"role": "user", "content": []}], r"message 1: content is \[\]"),
        ([user({"type": "image", "image": "a.png"})], "message 1, part 1: type 'image' is not supported"),
        ([user(text("a"), {"type": "video", "video": "a.mp4"})], "message 1, part 2: type 'video' is not supported"),
        ([user({"type": "sound"})], "message 1, part 1: type 'sound' is unknown"),
        ([user(["a"])], "message 1, part 1: is list"),
        ([user({"type": "text", "text": None})], "message 1, part 1: 'text' is None"),
        ([user({"type": "audio"})], "message 1, clip 1: no clip in 'audio'"),
        ([user("a"), assistant([audio("a.wav")])], "message 2, part 1: a clip in a turn of the assistant"),
        ([{"role": "system", "content": [audio("a.wav")]}, user("a")], "message 1, part 1: a clip in a turn of the s"),
        ([user("hear <audio_soft_token>")], "message 1: <audio_soft_token> in a text"),
        ([user(text("see <image_soft_token>"))], "message 1: <image_soft_token> in a text"),
        ([user("a"), assistant("b<end_of_turn>")], "message 2: <end_of_turn> in a text"),
        ([{"role": "system", "content": [text("a"), text("lost")]}, user("b")], "message 1: .* drops 'lost'"),
        ([{"role": "system", "content": "alone"}], "message 1: .* drops 'alone'"),
    ],
)
def test_messages_that_cannot_be_used_are_refused_by_place(ours, messages, message):
    with pytest.raises(UserError, match=message):
        ours(messages)


def test_the_number_of_clips_must_agree(ours):
    wave = np.zeros(SAMPLE_RATE, np.float32)
    for turn, waves in ((user("a"), [wave]), (user(audio(wave), audio(wave)), [wave]), (user(audio(wave)), [])):
        with pytest.raises(UserError, match="clips"):
            ours([turn], waves)


@pytest.mark.parametrize(
    "wave, message",
    [
        (np.zeros(0, np.float32), "no samples"),
        (np.array([0.0, np.nan] * 800), "NaN or infinite"),
        (np.array([0.0, np.inf] * 800), "NaN or infinite"),
        (np.zeros((2, 1600), np.float32), r"float32 of shape \[2, 1600\]"),
        (np.zeros(1600, np.int16), "int16"),
        ([0.0] * 1600, "list"),
        (np.zeros(512, np.float32), "512 samples"),
    ],
)
def test_samples_that_are_no_clip_are_refused(ours, wave, message):
    with pytest.raises(UserError, match=f"message 1, clip 1: .*{message}"):
        ours([user({"type": "audio"})], [wave])


def test_files_that_are_no_clip_are_refused_by_name(ours, tmp_path):
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), SAMPLE_RATE)
    soundfile.write(tmp_path / "nan.wav", np.full(1600, np.nan), SAMPLE_RATE, subtype="FLOAT")
    (tmp_path / "zero.wav").touch()
    (tmp_path / "text.wav").write_text("not a sound\n" * 100)
    (tmp_path / "raw.raw").write_bytes(bytes(3200))
    (tmp_path / "folder.wav").mkdir()
    soundfile.write(tmp_path / "whole.flac", voice(1), SAMPLE_RATE)
    (tmp_path / "half.flac").write_bytes((tmp_path / "whole.flac").read_bytes()[:8000])
    for name, message in {
        "missing.wav": "no such file",
        "empty.wav": "no samples",
        "nan.wav": "NaN",
        "zero.wav": "the file is empty",
        "text.wav": "cannot be read as audio",
        "raw.raw": "cannot be read as audio",
        "folder.wav": "is a folder",
        "half.flac": "",
    }.items():
        with pytest.raises(UserError, match=f"^{tmp_path / name}: .*{message}"):
            ours([user(audio(name))], root=tmp_path)


def test_folders_that_are_no_checkpoint_are_refused_by_name(folder, tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path / 'none'}: no such checkpoint folder"):
        Processor.from_pretrained(tmp_path / "none")
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match=f"{tmp_path / 'bare'}: no readable tokenizer"):
        Processor.from_pretrained(tmp_path / "bare")
    for name, content, message in (
        ("tokenizer.json", "{", "no readable tokenizer"),
        ("processor_config.json", "{", "processor_config.json: cannot be read as JSON"),
        ("chat_template.jinja", None, "no chat template"),
        ("generation_config.json", "[]", "generation_config.json: holds list"),
    ):
        broken = tmp_path / name
        shutil.copytree(folder, broken)
        (broken / name).unlink(missing_ok=True)
        if content is not None:
            (broken / name).write_text(content)
        with pytest.raises(UserError, match=f"^{broken}.*{message}"):
            Processor.from_pretrained(broken)


def test_another_checkpoints_tokenizer_is_refused(folder, tmp_path):
    from tests.reference import AWKWARD, reference_config

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = reference_config(**AWKWARD["five"], audio_soft_tokens_per_image=188, audio_token_id=500)
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="config.json: audio_token_id is 500, and the tokenizer's"):
        Processor.from_pretrained(tmp_path)


def test_a_checkpoint_without_an_extractor_takes_text_only(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "processor_config.json").unlink()
    processor = Processor.from_pretrained(tmp_path)
    assert processor([user("Hi"), assistant("Hello")]).input_features is None
    with pytest.raises(UserError, match="takes text only"):
        processor([user(audio(np.zeros(SAMPLE_RATE, np.float32)))])


@pytest.mark.parametrize(
    "template, messages, message",
    [
        ("{% if m.content is string %}{{ m.content }}{% endif %}", [user(audio(None))], "0 places for 1 clips"),
        ("{{ m.content | upper }}<end_of_turn>", [user("Hi")], "message 1: the chat template rewrites 'Hi'"),
        ("{{ m.content }}{{ m.content }}<end_of_turn>", [user("Hi")], "repeats"),
        ("{{ m.content }}</s>", [user("Hi"), assistant("Hello")], "does not end each answer"),
        ("{{ m.content }}{{ raise_exception('not that') }}", [user("Hi")], "refuses the messages: not that"),
    ],
)
def test_templates_that_are_not_gemma_3n_are_refused(folder, tmp_path, template, messages, message):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    loop = "{{ bos_token }}{% for m in messages %}" + template + "{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(loop)
    clips = [np.zeros(SAMPLE_RATE, np.float32)] if messages[0]["content"] != "Hi" else None
    with pytest.raises(UserError, match=message):
        Processor.from_pretrained(tmp_path)(messages, clips)


def test_a_placeholder_put_together_from_parts_is_refused(ours):
    with pytest.raises(UserError, match="1 places for 0 clips"):
        ours([user(text("<audio_soft_"), text("token>"))])


# --- the rest ---


def test_what_ends_a_turn(folder, ours, tmp_path):
    tokenizer = ours.tokenizer
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert {tokenizer.eos_token_id, end} <= set(ours.eos_token_ids)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert Processor.from_pretrained(tmp_path).eos_token_ids == tuple(sorted({5, 7, tokenizer.eos_token_id, end}))


def test_works_without_torch_and_imports_no_mlx(folder, clips):
    script = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.split(".")[0] in ("torch", "torchvision", "torchaudio", "timm", "mlx", "mlx_lm", "librosa")
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
from mlx_gemma3n.processor import Processor
example = Processor.from_pretrained(sys.argv[1])(
    [{"role": "user", "content": [{"type": "audio", "audio": sys.argv[2]}]}, {"role": "assistant", "content": "yes"}]
)
assert not {"torch", "mlx", "mlx_lm"} & set(sys.modules)
print(example.input_ids.sum(), example.input_features.shape)
"""
    clip = clips / "stereo-44100.wav"
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(clip)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    example = Processor.from_pretrained(folder)([user(audio(clip)), assistant("yes")])
    assert done.stdout == f"{example.input_ids.sum()} {example.input_features.shape}\n"
