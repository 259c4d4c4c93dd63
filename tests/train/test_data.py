"""Data files: what is refused, by file and line, and what an example holds."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from mlx_gemma3n.config import UserError
from tests.train.small_processor import small_processor
from train import data
from train.data import find_files, load_examples

SOFT, MOST = 20, 16_000


@pytest.fixture(scope="module")
def processor():
    return small_processor(497, 8, 496, SOFT, MOST)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "clips").mkdir()
    for name, seconds, rate in (("a", 0.5, 16_000), ("b", 0.9, 8_000), ("edge", 1.0, 44_100), ("long", 2.5, 16_000)):
        wave = rng.normal(0, 0.1, int(seconds * rate)).astype(np.float32)
        soundfile.write(tmp_path / "clips" / f"{name}.wav", wave, rate)
    return tmp_path


def user(*parts: str) -> dict:
    """A user's turn of clips (`x.wav`) and texts."""
    content = [
        {"type": "audio", "audio": f"clips/{p}"} if p.endswith(".wav") else {"type": "text", "text": p} for p in parts
    ]
    return {"role": "user", "content": content}


def parts(*content: dict) -> dict:
    return {"role": "user", "content": list(content)}


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


def example(*messages: dict, **more) -> str:
    return json.dumps({"messages": list(messages), **more})


GOOD = [
    example(user("a.wav", "Say it."), answer("yes"), id=7),
    example({"role": "system", "content": "Be kind."}, user("x"), answer("one"), user("b.wav", "a.wav"), answer("two")),
    example({"role": "user", "content": "hello"}, answer("caf\u00e9")),
]


def write(folder: Path, *lines: str, name: str = "train.jsonl") -> Path:
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def test_examples_are_the_processors(folder, processor):
    file = write(folder, *GOOD, GOOD[0])
    examples = load_examples(file, processor)
    assert [e.line for e in examples] == [1, 2, 3, 4]
    for line, example in zip([*GOOD, GOOD[0]], examples):
        want = processor(json.loads(line)["messages"], root=folder)
        assert (example.input_ids == want.input_ids).all() and (example.labels == want.labels).all()
        if want.input_features is None:
            assert example.features(processor) is None and example.clips == ()
        else:
            features, mask = example.features(processor)
            assert (features == want.input_features).all() and (mask == want.input_features_mask).all()
    assert examples[1].clips == (folder / "clips/b.wav", folder / "clips/a.wav")
    text = processor.tokenizer.decode(examples[1].labels[examples[1].labels != -100])
    assert text.replace(" ", "") == "one<end_of_turn>two<end_of_turn>"


def test_loading_decodes_no_clip_that_surely_fits(folder, processor, monkeypatch):
    monkeypatch.setattr("mlx_gemma3n.processor.load_audio", lambda path: pytest.fail(f"{path} was decoded"))
    assert len(load_examples(write(folder, *GOOD), processor)) == 3


def test_paths_follow_the_data_file_not_the_working_folder(folder, processor, monkeypatch):
    write(folder, GOOD[0])
    monkeypatch.chdir(folder.parent)
    (example,) = load_examples(Path(folder.name) / "train.jsonl", processor)
    assert example.features(processor)[0].shape[0] == 1
    assert example.where == f"{folder.name}/train.jsonl:1"


def test_blank_lines_a_byte_order_mark_and_carriage_returns_do_no_harm(folder, processor):
    file = folder / "train.jsonl"
    file.write_bytes(b"\xef\xbb\xbf\r\n" + GOOD[0].encode() + b"\r\n  \r\n\r\n" + GOOD[2].encode())
    assert [e.line for e in load_examples(file, processor)] == [2, 5]


def test_line_separators_within_a_text_do_not_end_the_line(folder, processor):
    line = json.dumps({"messages": [user("a\u2028b"), answer("c")]}, ensure_ascii=False)
    assert len(load_examples(write(folder, line), processor)) == 1


WRONG = [
    ('{"messages": [', "not JSON (Expecting value at column 15); an example is one object on one line"),
    ("[]", 'no "messages" in it'),
    ('{"prompt": "a"}', 'no "messages" in it'),
    (example(), "messages: want a list of at least one message"),
    ('{"messages": "hello"}', "messages: want a list"),
    (example(user("a")), "no turn of the assistant; add the answer to learn"),
    (example(answer("a")), "message 1: role is assistant, want user"),
    (example(user("a"), user("b"), answer("c")), "message 2: role is user, want assistant"),
    (example(user("a"), answer("b"), answer("c")), "message 3: role is assistant, want user"),
    (example(user("a"), {"role": "system", "content": "b"}, answer("c")), "message 2: role is system, want assistant"),
    (example({"role": "human", "content": "a"}, answer("b")), "message 1: role is 'human'"),
    (example(user("a"), answer(" \n")), "message 2: the assistant says nothing"),
    (example(user(""), answer("b")), "message 1: the user says nothing"),
    (example(parts({"type": "image", "image": "x"}), answer("b")), "message 1, part 1: type 'image'"),
    (example(user("a"), {**user("a.wav"), "role": "assistant"}), "message 2, part 1: a clip in a turn of the assist"),
    (example(user("none.wav"), answer("b")), "clips/none.wav: no such file; paths are relative to "),
    (example(parts({"type": "audio"}), answer("b")), "'audio' is None; want the path of a clip"),
    (example(parts({"type": "audio", "audio": "clips"}), answer("b")), "clips: no such file"),
    (example(user("long.wav"), answer("b")), "clips/long.wav: 2.5"),
    (example(user("<audio_soft_token>"), answer("b")), "message 1: "),
    ("[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize("line, message", WRONG)
def test_a_wrong_line_is_named(folder, processor, line, message):
    file = write(folder, GOOD[0], "", line, GOOD[1])
    with pytest.raises(UserError) as e:
        load_examples(file, processor)
    assert str(e.value).startswith(f"{file}:3: ") and message in str(e.value)
    assert "\n" not in str(e.value)


def test_other_wrong_lines_are_counted(folder, processor):
    lines = [line for line, _ in WRONG[:3]]
    with pytest.raises(UserError, match=r":2: not JSON .* \(2 more lines are wrong\)$"):
        load_examples(write(folder, GOOD[0], *lines), processor)
    with pytest.raises(UserError, match=r":1: .*long.wav.* \(1 more line is wrong\)$"):
        load_examples(write(folder, WRONG[18][0], GOOD[0], WRONG[18][0]), processor)


def test_bytes_that_are_not_utf_8(folder, processor):
    file = folder / "train.jsonl"
    file.write_bytes(GOOD[0].encode() + b'\n{"messages": "\xe9"}\n')
    with pytest.raises(UserError, match=":2: not UTF-8 at byte 15; save the file as UTF-8"):
        load_examples(file, processor)


def test_a_clip_that_is_no_audio(folder, processor):
    (folder / "clips/bad.wav").write_bytes(b"RIFF not really")
    with pytest.raises(UserError, match=r"train.jsonl:1: .*bad.wav: cannot be read as audio"):
        load_examples(write(folder, example(user("bad.wav"), answer("b"))), processor)


def test_no_examples(folder, processor):
    with pytest.raises(UserError, match="no examples in it"):
        load_examples(write(folder, "", " "), processor)
    with pytest.raises(UserError, match="none.jsonl: no such file"):
        load_examples(folder / "none.jsonl", processor)


def test_long_clips_are_split_or_cut_when_asked_and_counted(folder, processor, caplog):
    file = write(folder, example(user("long.wav", "edge.wav"), answer("b")), GOOD[0])
    with caplog.at_level(logging.WARNING):
        split, _ = load_examples(file, processor, "split")
        cut, _ = load_examples(file, processor, "truncate")
    assert (split.input_ids == 497).sum() == 4 * SOFT and split.features(processor)[0].shape[0] == 4
    assert (cut.input_ids == 497).sum() == 2 * SOFT and cut.features(processor)[0].shape[0] == 2
    assert [r.getMessage() for r in caplog.records] == [
        f"{file}: 1 clips are longer than 1.0 s and are split into pieces",
        f"{file}: 1 clips are longer than 1.0 s and are cut off there",
    ]


def test_a_clip_that_changed_since_is_refused(folder, processor):
    (split,) = load_examples(write(folder, example(user("long.wav"), answer("b"))), processor, "split")
    (example_,) = load_examples(write(folder, GOOD[0]), processor)
    soundfile.write(folder / "clips/long.wav", np.zeros(8_000, np.float32), 16_000)
    with pytest.raises(UserError, match=r"train.jsonl:1: a clip has another length than when the run began"):
        split.features(processor)
    (folder / "clips/a.wav").unlink()
    with pytest.raises(UserError, match=r"train.jsonl:1: .*a.wav: no such file"):
        example_.features(processor)


def test_a_header_that_lies_is_not_believed(folder, processor, monkeypatch):
    monkeypatch.setattr("soundfile.info", lambda path: SimpleNamespace(frames=2**31 - 1, samplerate=16_000))
    assert (load_examples(write(folder, GOOD[0]), processor)[0].input_ids == 497).sum() == SOFT


def test_find_files(folder, caplog):
    with pytest.raises(UserError, match="train.jsonl: no such file; a data folder has train.jsonl and valid.jsonl"):
        find_files(folder)
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        find_files(folder / "nowhere")
    train = write(folder, GOOD[0])
    assert find_files(folder) == (train, None) and "nothing is evaluated" in caplog.text
    assert find_files(train) == (train, None)
    valid = write(folder, GOOD[0], name="valid.jsonl")
    caplog.clear()
    assert find_files(folder) == (train, valid) and not caplog.text


def test_neither_mlx_nor_torch_is_needed():
    without = "import sys; sys.modules['mlx'] = sys.modules['torch'] = None"
    subprocess.run([sys.executable, "-c", f"{without}; import train.config, train.data, train.batching"], check=True)
    assert data.STAND_IN.dtype == np.float32
