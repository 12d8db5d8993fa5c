"""Available host memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def available_host_memory() -> int | None:
    """Bytes that processes on this host can still allocate, within a container's limit; None if the system
    does not report it.
    """
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError, StopIteration):  # "max" means no limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        lines = (group / "memory.stat").read_text().splitlines()
        cached = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        found.append(limit - used + cached)  # the page cache can be evicted
    return max(0, min(found)) if found else None
