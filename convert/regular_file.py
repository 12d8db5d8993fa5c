"""Open files at paths from outside, if they are regular files."""

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path) -> int:
    """Open a regular file for reading. Anything else is refused: reading it could block, or never end.

    Raises:
        OSError: it cannot be opened, or is a folder, a named pipe, a socket or a device.
    """
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a null byte in its name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise OSError(errno.EINVAL, f"it is {kind}, expected a file", str(path))
    # By now it may be a pipe, which would wait for a writer. Windows has no such pipes, and text by default.
    return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
