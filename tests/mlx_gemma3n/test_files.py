"""Safetensors piece by piece against the safetensors library, and folders that are there whole or not at all."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mlx_gemma3n.config import UserError
from mlx_gemma3n.files import NewTensor, SafetensorsWriter, stored_tensors, write_aside, write_text

ROOT = Path(__file__).parents[2]
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I64": torch.int64, "U8": torch.uint8}


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "bytes": torch.arange(7, dtype=torch.uint8),
        "table": torch.randn(33, 5).to(torch.bfloat16),
        "half": torch.randn(4, 3, 2).half(),
        "vector": torch.randn(11),
        "count": torch.tensor(3),
        "empty": torch.zeros(0, 4),
    }


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_reads_what_the_library_wrote(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    stored = {t.name: t for t in stored_tensors(tmp_path / "a.safetensors")}
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert TORCH[stored[name].dtype] == tensor.dtype
        assert stored[name].shape == tuple(tensor.shape)
        assert stored[name].metadata == {"format": "pt"}
        assert bytes(stored[name].read()) == raw(tensor)


@pytest.mark.parametrize("most", [1, 10, 33, 100, 10_000])
def test_slices_of_rows_are_the_whole(tmp_path, most):
    save_file(some_tensors(), tmp_path / "a.safetensors")
    for tensor in stored_tensors(tmp_path / "a.safetensors"):
        slices = list(tensor.slices(most))
        assert b"".join(tensor.read(*s) for s in slices) == bytes(tensor.read())
        assert all((end - begin) * tensor.row_bytes <= most or end - begin == 1 for begin, end in slices)


@pytest.mark.parametrize("shard_bytes, files", [(10**9, 1), (300, 3), (1, 6)])
def test_the_library_reads_what_was_written_in_pieces(tmp_path, shard_bytes, files):
    tensors = some_tensors()
    names = {dtype: name for name, dtype in TORCH.items()}
    new = [NewTensor(name, names[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
    with SafetensorsWriter(tmp_path, new, {"format": "mlx"}, shard_bytes) as writer:
        # Interleaved, as weights, scales and biases are.
        pieces = {name: [raw(t)[i : i + 13] for i in range(0, len(raw(t)), 13)] for name, t in tensors.items()}
        for i in range(max(map(len, pieces.values()))):
            for name in reversed(pieces):
                if i < len(pieces[name]):
                    writer.write(name, pieces[name][i])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    written = sorted(tmp_path.glob("*.safetensors"))
    assert len(written) <= files and {f.name for f in written} == set(index["weight_map"].values())
    assert (len(written) == 1) == (written[0].name == "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    found = {}
    for file in written:
        found |= {(name, file.name): t for name, t in load_file(file).items()}
    assert {name for name, _ in found} == tensors.keys() and len(found) == len(tensors)
    for (name, file), tensor in found.items():
        assert index["weight_map"][name] == file
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])


def test_an_array_is_a_piece_too(tmp_path):
    array = np.arange(12, dtype=np.uint32).reshape(3, 4)
    with SafetensorsWriter(tmp_path, [NewTensor("x", "U32", (6, 4))]) as writer:
        writer.write("x", array)
        writer.write("x", array + 12)
    assert bytes(stored_tensors(tmp_path / "model.safetensors")[0].read()) == np.arange(24, dtype=np.uint32).tobytes()


def test_a_tensor_half_written_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="not written to their end: b"):
        with SafetensorsWriter(tmp_path, [NewTensor("a", "U8", (2,)), NewTensor("b", "U8", (2,))]) as writer:
            writer.write("a", b"xy")
            writer.write("b", b"x")
    assert not (tmp_path / "model.safetensors.index.json").exists()
    with pytest.raises(ValueError, match="has 2 bytes"):
        with SafetensorsWriter(tmp_path, [NewTensor("a", "U8", (2,))]) as writer:
            writer.write("a", b"xyz")


def header(values: object) -> bytes:
    text = json.dumps(values).encode()
    return struct.pack("<Q", len(text)) + text


DAMAGED = {
    "empty": b"",
    "a web page": b"<!DOCTYPE html><html>" + b" " * 200,
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4000000000\n",
    "no object": header([1, 2]),
    "no offsets": header({"x": {"dtype": "F32", "shape": [2]}}),
    "holes": header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}) + bytes(8),
    "other sizes": header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}) + bytes(4),
    "too long": header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + bytes(5),
    "unknown type": header({"x": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}) + bytes(4),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_named(tmp_path, kind):
    file = tmp_path / "model.safetensors"
    file.write_bytes(DAMAGED[kind])
    with pytest.raises(UserError) as error:
        stored_tensors(file)
    assert str(error.value).startswith(f"{file}: ") and "\n" not in str(error.value)


def test_a_file_cut_anywhere_is_named(tmp_path):
    save_file(some_tensors(), tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    file = tmp_path / "cut.safetensors"
    for length in range(0, len(content), 29):
        file.write_bytes(content[:length])
        with pytest.raises(UserError, match=f"^{file}: "):
            stored_tensors(file)
    file.write_bytes(content)
    tensor = stored_tensors(file)[-1]
    os.truncate(file, len(content) - 1)
    with pytest.raises(UserError, match=f"^{file}: ends within {tensor.name}"):
        tensor.read()


def test_no_such_file_is_named(tmp_path):
    with pytest.raises(UserError, match="gone.safetensors: no such file"):
        stored_tensors(tmp_path / "gone.safetensors")


def test_a_folder_appears_when_it_is_whole(tmp_path):
    target = tmp_path / "runs" / "one"
    with write_aside(target) as aside:
        (aside / "a.txt").write_text("a")
        assert not target.exists() and aside.parent == target.parent and aside.name.startswith(".one.partial-")
    assert [p.name for p in target.parent.iterdir()] == ["one"]
    assert (target / "a.txt").read_text() == "a"
    plain = tmp_path / "plain"
    plain.mkdir()
    assert target.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_nothing_is_left_of_a_failure(tmp_path, error):
    with pytest.raises(error):
        with write_aside(tmp_path / "one") as aside:
            (aside / "a.txt").write_text("a")
            raise error
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("full", "file"):
        with pytest.raises(UserError, match=f"{tmp_path / name}: exists already"):
            with write_aside(tmp_path / name):
                raise AssertionError("entered")
    with write_aside(tmp_path / "empty") as aside:
        (aside / "a.txt").write_text("a")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "full"]
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


def test_a_replaced_folder_is_the_old_or_the_new(tmp_path):
    target = tmp_path / "adapter"
    for text in ("old", "new"):
        with write_aside(target, replace=True) as aside:
            (aside / "a.txt").write_text(text)
            if text == "new":
                assert (target / "a.txt").read_text() == "old"
    with pytest.raises(RuntimeError):
        with write_aside(target, replace=True) as aside:
            (aside / "a.txt").write_text("broken")
            raise RuntimeError
    assert (target / "a.txt").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_a_small_file_is_replaced_whole(tmp_path):
    file = tmp_path / "plan.json"
    write_text(file, "old")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    code = f"{limit}; from mlx_gemma3n.files import write_text; write_text({str(file)!r}, 'x' * 10_000)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "File too large" in done.stderr
    assert file.read_text() == "old"
    write_text(file, "new")
    assert file.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_full_disk_names_the_file(tmp_path):
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "from mlx_gemma3n.files import *\n"
        f"with SafetensorsWriter({str(tmp_path)!r}, [NewTensor('x', 'U8', (4000,))]) as w:\n"
        "    try: w.write('x', bytes(4000))\n"
        "    except OSError as e: print(e.filename); raise\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.strip() == str(tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors.index.json").exists()
