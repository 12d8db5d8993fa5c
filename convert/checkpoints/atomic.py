"""Atomic replacement of a folder.

    with atomic_folder("out") as new:
        (new / "model.safetensors").write_bytes(...)

The new folder is filled next to its target under a hidden name, synced to disk, and exchanged with the old
one by a single system call. A process killed at any moment leaves either the complete old folder or the
complete new one. Hidden folders left behind are removed by the next `atomic_folder` on the same target,
before anything is written, and after an hour by one on any target in the same folder.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from liger_models.convert.errors import CheckpointError
from liger_models.convert.host import close, lock, open_folder

STALE_SECONDS = 3600


@contextmanager
def atomic_folder(
    target: str | Path, *, replaces: Callable[[str], bool] = lambda name: True
) -> Iterator[Path]:
    """Yields an empty folder that becomes `target` when the block ends, and is deleted if it raises.

    Args:
        target: the folder to create or replace. Missing parents are created. replaces: whether the new folder
        replaces an existing target's entry of this name. Every other entry that the
            block did not write is kept.

    Raises:
        CheckpointError: the target is a file or a mount point, or its parent is not writable.
    """
    target = Path(os.path.realpath(target))  # follow a symlink, which stays in place
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is a file, expected a folder; choose another name")
    if os.path.ismount(target):
        raise CheckpointError(
            f"{target}: is a mount point, which cannot be replaced in one step; choose a folder inside it"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_stale(target)
        new = _hidden(target, "tmp")
        new.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"{target.parent}: cannot create a folder there ({error.strerror}); the new version of "
            f"{target.name!r} is written next to the old one, so its parent must be writable"
        ) from error
    handle = open_folder(new)
    try:
        # A kill releases it too, so the next save knows that the folder is stale.
        lock(handle)
        yield new
        if target.exists():
            shutil.copymode(target, new)
            _keep_entries(target, new, replaces)
        _sync_tree(new)
        _put_in_place(new, target)
        _sync(target.parent)
    finally:
        close(handle)
        # By now it holds the old version or, after an error, the incomplete new one.
        shutil.rmtree(new, ignore_errors=True)


@contextmanager
def alone_at(target: str | Path) -> Iterator[bool]:
    """Lets one of the processes that write the same folder at the same time proceed, while the others wait.

    Yields True in the process that is to write, False in those that waited for another. If a process dies or
    fails before the folder is in place, the next one takes over.
    """
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    path, before, waited = target.with_name(f".{target.name}.lock"), _identity(target), False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not lock(handle, wait=False):
                waited = lock(handle)
        except OSError:  # a filesystem without locks
            break
        if _identity(path) == _identity(handle):
            break
        os.close(handle)  # the previous owner removed the file
    try:
        yield not (waited and _identity(target) != before)
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _identity(path: Path | int) -> int | None:
    """Identifies a folder or file, to detect a replacement."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file's name to OS errors raised in the block; write errors, such as a full disk, lack it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _hidden(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{secrets.token_hex(6)}")


def _is_hidden(path: Path) -> bool:
    """Whether `_hidden` could have created this folder, and not a program with similar names."""
    made = re.fullmatch(r"\..*\.(tmp|old)-[0-9a-f]{12}", path.name, re.DOTALL) is not None
    return made and path.is_dir() and not path.is_symlink()


def _clear_stale(target: Path) -> None:
    """Removes the remains of killed processes next to the target."""
    moved_away = [p for p in sorted(target.parent.glob(f".{_escape(target.name)}.old-*")) if _is_hidden(p)]
    if moved_away and not target.exists():
        os.rename(moved_away.pop(), target)
    own = list(target.parent.glob(f".{_escape(target.name)}.tmp-*"))
    others = [p for p in target.parent.glob(".*.tmp-*") if p not in own and _is_hidden(p) and _is_old(p)]
    for folder in [*moved_away, *own, *others]:
        if not _is_hidden(folder):
            continue
        handle = open_folder(folder)
        try:
            if not lock(handle, wait=False):
                continue  # another process is writing it now
        finally:
            close(handle)
        shutil.rmtree(folder, ignore_errors=True)


def _is_old(folder: Path) -> bool:
    """Whether nothing in a folder has changed for an hour. Its lock may be held on another machine."""
    try:
        changed = max(os.lstat(path).st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:  # it is being written, or is gone
        return False
    return time.time() - changed > STALE_SECONDS


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _keep_entries(old: Path, new: Path, replaces: Callable[[str], bool]) -> None:
    for entry in os.scandir(old):
        if not replaces(entry.name) and not os.path.lexists(new / entry.name):
            link_tree(Path(entry.path), new / entry.name)


def link_tree(source: Path, dest: Path) -> None:
    """Hard-links `source` at `dest`: both names refer to the same files, including open ones."""
    if source.is_dir() and not source.is_symlink():
        dest.mkdir()
        shutil.copymode(source, dest)
        for entry in os.scandir(source):
            link_tree(Path(entry.path), dest / entry.name)
        return
    try:
        os.link(source, dest, follow_symlinks=False)
    except OSError:  # a filesystem without hard links
        shutil.copy2(source, dest, follow_symlinks=False)


def _put_in_place(new: Path, target: Path) -> None:
    if not target.exists():
        os.rename(new, target)
    elif not _exchange(new, target):
        # No exchange on this filesystem: for a moment the target has only its hidden name, from which the
        # next save restores it.
        old = _hidden(target, "old")
        os.rename(target, old)
        os.rename(new, target)
        os.rename(old, new)


def _exchange(a: Path, b: Path) -> bool:
    """Exchanges two names atomically; False if the system cannot."""
    if os.name == "nt":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_fdcwd, rename_exchange = -100, 2
    if renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), ctypes.c_uint(rename_exchange)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(b))


def _sync_tree(folder: Path) -> None:
    for path, _, files in os.walk(folder, topdown=False):
        for name in files:
            if not os.path.islink(os.path.join(path, name)):
                _sync(Path(path, name))
        _sync(Path(path))


def _sync(path: Path) -> None:
    # Windows syncs no folders, and files only through a handle that may write.
    folder = path.is_dir()
    handle = open_folder(path) if folder else os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    if handle is None:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
