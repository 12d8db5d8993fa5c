"""Services of the operating system: processor cores, and locks of files and folders.

Linux and macOS have all of it. On Windows, which has no advisory locks of folders, nothing is locked: two
processes that write the same folder at once are then not kept apart.
"""

from __future__ import annotations

import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

OPENS_FOLDERS = os.name != "nt"


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def open_folder(path: Path) -> int | None:
    """Open a folder and return its handle, to lock or sync it; None where folders cannot be opened.

    Raises:
        OSError: there is no such folder.
    """
    if not OPENS_FOLDERS:
        path.stat()
        return None
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def close(handle: int | None) -> None:
    """Close a handle, which also releases its lock."""
    if handle is not None:
        os.close(handle)


def lock(handle: int | None, *, wait: bool = True) -> bool:
    """Lock an open file or folder for this process only, until the handle is closed or the process dies.

    Returns:
        False if another process holds the lock and `wait` is False.

    Raises:
        OSError: the file system has no locks. Where the operating system has none, nothing is locked.
    """
    if fcntl is None or handle is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
