"""Files that are there whole or not at all (written aside, fsynced, renamed), and safetensors files piece by piece.

The safetensors library reads and writes whole tensors, and Gemma 3n has one of 4 GB. Here a tensor is read and written
a few rows at a time, as plain bytes: numpy has no bfloat16, and what is carried through need not be understood.
"""

import json
import math
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Iterator, Optional, Sequence

from mlx_gemma3n.config import UserError


def fsync(path: Path) -> None:
    """Forces a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Forces a folder and everything in it to the disk."""
    if path.is_dir():
        for child in path.iterdir():
            fsync_tree(child)
    fsync(path)


def refuse_existing(folder: str | Path) -> Path:
    """`folder`, which must not exist or be empty, so that nothing of the user's is overwritten.

    Raises:
        UserError: it exists and is not an empty folder.
    """
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder}: exists already; name another place or remove it")
    return folder


@contextmanager
def write_aside(folder: str | Path, replace: bool = False) -> Iterator[Path]:
    """A new folder beside `folder`, moved into its place once the block has ended well; removed where it has not.

    A process that is killed leaves a folder named `.NAME.partial-…`, never one that looks finished.

    Args:
        replace: whether an existing `folder` is replaced; its old state is there until the new one is.

    Raises:
        UserError: `folder` exists and is not to be replaced.
    """
    folder = Path(folder)
    if not replace:
        refuse_existing(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        # mkdtemp's folder is private; what the user gets has the rights of any other folder of theirs.
        umask = os.umask(0)
        os.umask(umask)
        aside.chmod(0o777 & ~umask)
        yield aside
        fsync_tree(aside)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old-", dir=folder.parent))
            os.rename(folder, old / folder.name)
            os.rename(aside, folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(aside, folder)
        fsync(folder.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Writes a small file aside and moves it into place, so that readers see the old one or the new one, whole."""
    path = Path(path)
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(aside, 0o666 & ~umask)
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


# Bytes of an element, by safetensors' name of its type.
DTYPE_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4},
    **{"F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1},
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a safetensors file; its bytes are read when asked for.

    Attributes:
        dtype: safetensors' name of the type, such as "BF16".
        offset: of its first byte in `file`.
        metadata: of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    metadata: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first axis; of the whole where there is none."""
        return math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def slices(self, most: int) -> Iterator[tuple[int, int]]:
        """Ranges of rows, together all of them, each of at most `most` bytes or of one row."""
        rows = self.shape[0] if self.shape else 1
        step = max(1, most // max(1, self.row_bytes))
        for begin in range(0, rows, step):
            yield begin, min(begin + step, rows)

    def read(self, begin: int = 0, end: Optional[int] = None) -> bytearray:
        """The bytes of rows `begin` to `end`, of all by default.

        Raises:
            UserError: the file has become shorter since it was opened.
        """
        end = (self.shape[0] if self.shape else 1) if end is None else end
        buffer = bytearray((end - begin) * self.row_bytes)
        view, done = memoryview(buffer), 0
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.offset + begin * self.row_bytes)
            while done < len(buffer):
                count = file.readinto(view[done:])
                if not count:
                    raise UserError(f"{self.file}: ends within {self.name}; fetch it again")
                done += count
        return buffer


def stored_tensors(file: str | Path) -> list[StoredTensor]:
    """What a safetensors file holds, in the order of its bytes; only the header is read.

    Raises:
        UserError: it is not a safetensors file, or it was cut short.
    """
    file = Path(file)
    try:
        with open(file, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            start = f.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size - 8, 100_000_000):
                raise ValueError("no header of that length")
            header = json.loads(f.read(length))
        metadata = header.pop("__metadata__", {})
        tensors, ends = [], [0]
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            tensor = StoredTensor(name, entry["dtype"], tuple(entry["shape"]), file, 8 + length + begin, metadata)
            if tensor.dtype not in DTYPE_BYTES:
                raise UserError(f"{file}: {name} is of type {tensor.dtype}, which is not known")
            if tensor.nbytes != end - begin or begin != ends[-1]:
                raise ValueError(f"the bytes of {name} do not add up")
            tensors.append(tensor)
            ends.append(end)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{file}: not a safetensors file ({e}); fetch it again") from None
    if 8 + length + ends[-1] != size:
        raise UserError(
            f"{file}: {size} bytes, its header says {8 + length + ends[-1]}; was the download cut short? fetch it again"
        )
    return tensors


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class SafetensorsWriter:
    """Writes a checkpoint's tensors piece by piece, in any order, holding none of them.

    Names, types and shapes are known before the first byte is, so each tensor has its place in a file from the start.
    One file is named `model.safetensors`, several `model-00001-of-00003.safetensors`; either way there is an index.
    """

    def __init__(
        self,
        folder: str | Path,
        tensors: Sequence[NewTensor],
        metadata: Optional[dict[str, str]] = None,
        shard_bytes: int = 5_000_000_000,
    ):
        """
        Args:
            folder: it exists; write into the one of `write_aside`.
            tensors: all that will be written. They are put into files in this order.
            shard_bytes: the most bytes of tensors in a file, unless one tensor alone has more.
        """
        self.folder = Path(folder)
        shards: list[list[NewTensor]] = [[]]
        for tensor in tensors:
            if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > shard_bytes:
                shards.append([])
            shards[-1].append(tensor)
        self._files: list[BinaryIO] = []
        self._places: dict[str, tuple[BinaryIO, int, int]] = {}
        self._written: dict[str, int] = {}
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            one = "model.safetensors"
            name = one if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            self._open(self.folder / name, shard, metadata or {})
            weight_map |= {tensor.name: name for tensor in shard}
        self._index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors)},
            "weight_map": dict(sorted(weight_map.items())),
        }

    def _open(self, path: Path, tensors: list[NewTensor], metadata: dict[str, str]) -> None:
        header: dict = {"__metadata__": metadata}
        begin = 0
        # Wide types first: then each tensor lies at a multiple of its element's size, which torch needs to map it.
        tensors = sorted(tensors, key=lambda t: -DTYPE_BYTES[t.dtype])
        for t in tensors:
            header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [begin, begin + t.nbytes]}
            begin += t.nbytes
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        file = open(path, "wb")
        self._files.append(file)
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for t in tensors:
            self._places[t.name] = (file, 8 + len(encoded) + header[t.name]["data_offsets"][0], t.nbytes)
            self._written[t.name] = 0

    def write(self, name: str, piece: bytes | bytearray | memoryview) -> None:
        """Appends `piece` to tensor `name`.

        Raises:
            OSError: the disk does not take it; its `filename` is the file's.
        """
        file, offset, size = self._places[name]
        done = self._written[name]
        after = done + memoryview(piece).nbytes
        if after > size:
            raise ValueError(f"{name} has {size} bytes; {after} were written")
        try:
            file.seek(offset + done)
            file.write(piece)
            # Now, so that a full disk is met here, where the file is known.
            file.flush()
        except OSError as e:
            raise OSError(e.errno, e.strerror, file.name) from None
        self._written[name] = after

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: Optional[type], *_: object) -> None:
        """Closes the files; where nothing went wrong, also checks that all is written, and writes the index."""
        for file in self._files:
            try:
                file.close()
            except OSError:
                # What a failed write left behind cannot be flushed either; the first error is the one to show.
                if kind is None:
                    raise
        if kind is not None:
            return
        if lost := [name for name, (_, _, size) in self._places.items() if self._written[name] != size]:
            raise ValueError(f"not written to their end: {', '.join(lost[:5])}")
        text = json.dumps(self._index, indent=2) + "\n"
        (self.folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
