"""Stopping a run from outside: SIGINT (Ctrl-C) and SIGTERM (a scheduler's time limit)."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any


class Signals:
    """Turns SIGINT and SIGTERM into a flag read between micro-batches; a second signal acts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signum
        print(
            "\nstopping after this micro-batch, then saving; press again to stop without saving",
            file=sys.stderr,
        )
