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
    """tqdm's bar without tqdm's side effects on the process: a multiprocessing lock, whose creation fixes the
    start method of all later processes, and a monitor thread that outlives the last bar. If the output is not
    a terminal, a line is written every ten seconds instead.
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
        """tqdm's settings, with a width at which no line wraps, even if the terminal's width is unknown."""
        settings = super().format_dict
        file = settings.get("file") or getattr(self, "fp", None)
        if file is not None and file.isatty():
            settings["ncols"] = _columns(file) - 1
        return settings


class _Lines:
    """A file to which each state of a bar is written as a line."""

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
