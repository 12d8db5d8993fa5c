"""Progress bars."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from typing import Any, ClassVar
from weakref import WeakSet

from tqdm import tqdm


class ProgressBar(tqdm):
    """tqdm's bar, without what tqdm leaves in the process: its lock is one of multiprocessing, whose making
    fixes the start method of the user's own processes, and a monitor thread outlives the last bar. Where the
    output is no terminal, it is a line every ten seconds.
    """

    _lock = threading.RLock()
    _instances: ClassVar[WeakSet[Any]] = WeakSet()  # guarded by the lock, so not tqdm's own
    monitor_interval = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        file = options.get("file") or sys.stderr
        terminal = file.isatty()
        options |= {"file": file if terminal else _Lines(file)}
        super().__init__(*args, **{"mininterval": 0.2 if terminal else 10.0, **options})

    @property
    def format_dict(self) -> dict[str, Any]:
        """tqdm's, with a width at which no line wraps, also in terminals that do not know theirs."""
        settings = super().format_dict
        file = settings.get("file") or getattr(self, "fp", None)
        if file is not None and file.isatty():
            settings["ncols"] = _columns(file) - 1
        return settings


class _Lines:
    """A file in which each state of a bar is a line."""

    def __init__(self, file: Any) -> None:
        self.file, self.flush, self.isatty = file, file.flush, file.isatty

    def write(self, text: str) -> None:
        if state := text.strip():
            self.file.write(f"{state}\n")


def _columns(file: Any) -> int:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if columns := os.get_terminal_size(file.fileno()).columns:
            return columns
    return shutil.get_terminal_size().columns  # COLUMNS, or 80
