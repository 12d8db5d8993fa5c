"""Background writing of a run's folders.

If host memory has room for a copy, values are copied there and written by a thread, and the run waits only
for the copy. Each folder waits for the previous one.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from liger_models.convert.errors import CheckpointError
from liger_models.layers.recompute.host_memory import available_host_memory
from liger_models.training.checkpoints.contents import Contents
from liger_models.training.processes.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Saver:
    """Writes folders one after another. All processes of the world must make the same calls."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = world.host_group()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._pending: Future[None] | None = None

    def save(self, contents: Contents, *, meanwhile: bool = False) -> bool:
        """Write a folder after the previous one is complete; with `meanwhile` in a thread, if there is room
        for a copy of its contents. Returns whether the thread writes it.

        Raises:
            CheckpointError: this folder or the previous one could not be written. The old contents are
            untouched.
        """
        self.wait()
        if not (meanwhile and self._has_room(contents)):
            write(contents, self._group)
            return False
        self._pending = self._thread.submit(write, contents.copied(), self._group)
        return True

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            CheckpointError: as in `save`.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    @property
    def idle(self) -> bool:
        """Whether everything has been written, without an error."""
        return self._pending is None or (self._pending.done() and not self.failed)

    @property
    def failed(self) -> bool:
        """Whether `wait` is already known to raise."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def close(self) -> None:
        """Wait, ignoring errors."""
        with suppress(CheckpointError):
            self.wait()
        self._thread.shutdown()

    def _has_room(self, contents: Contents) -> bool:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self._world.size))
        short = 2 * local * contents.nbytes > (available_host_memory() or 0)  # leave half for everything else
        return not self._world.any(short)


def write(contents: Contents, group: ProcessGroup | None = None) -> None:
    """Write a folder now: from this process, or from all of `group`, which has host collectives.

    Raises:
        CheckpointError: in all processes if any fails. The old contents are untouched.
    """
    try:
        if group is None:
            whole = ((key, [0] * x.ndim, x) for key, x in contents.tensors.items())
            with contents.begun() as folder:
                contents.write(folder, whole)
        else:
            from liger_models.training.checkpoints.saving_together import (
                save_together,  # some builds of torch lack it
            )

            save_together(contents, group)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or contents.target}: cannot be written ({error.strerror or error}). Previous "
            "contents are untouched; free space, and continue (a run with --resume)"
        ) from error
