"""Files that are there whole or not at all: written aside, fsynced, renamed."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

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
