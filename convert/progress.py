"""Progress bars."""

from __future__ import annotations

import threading
from typing import Any, ClassVar
from weakref import WeakSet

from tqdm import tqdm


class ProgressBar(tqdm):
    """tqdm's bar, without what tqdm leaves in the process: its lock is one of multiprocessing, whose making
    fixes the start method of the user's own processes, and a monitor thread outlives the last bar.
    """

    _lock = threading.RLock()
    _instances: ClassVar[WeakSet[Any]] = WeakSet()  # guarded by the lock, so not tqdm's own
    monitor_interval = 0
