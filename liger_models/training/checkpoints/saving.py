"""Folders of a run, written while it goes on.

Where the host has room for a copy, the values are copied there, and a thread writes them: the run waits for
the copy alone. The next folder waits for the one before.
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
    """Writes folders, one after the other. All processes of the world must do the same with theirs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = world.host_group()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._pending: Future[None] | None = None

    def save(self, contents: Contents, *, meanwhile: bool = False) -> bool:
        """Write a folder, once the one before is in its place; `meanwhile`: in a thread, if there is room
        for a copy of what it holds. Whether it was left to the thread.

        Raises:
            CheckpointError: this one, or the one before, could not be written. What was there is untouched.
        """
        self.wait()
        if not (meanwhile and self._has_room(contents)):
            write(contents, self._group)
            return False
        self._pending = self._thread.submit(write, contents.copied(), self._group)
        return True

    def wait(self) -> None:
        """Until all is written.

        Raises:
            CheckpointError: as `save`.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    @property
    def failed(self) -> bool:
        """Whether `wait` would raise, as far as is known by now."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def close(self) -> None:
        """Wait, whatever becomes of it."""
        with suppress(CheckpointError):
            self.wait()
        self._thread.shutdown()

    def _has_room(self, contents: Contents) -> bool:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self._world.size))
        short = 2 * local * contents.nbytes > (available_host_memory() or 0)  # half of it is for all else
        return not self._world.any(short)


def write(contents: Contents, group: ProcessGroup | None = None) -> None:
    """Write a folder, now: by this process, or by all of `group`, which has collectives on the host.

    Raises:
        CheckpointError: in all processes, whichever of them failed. What was there is untouched.
    """
    try:
        if group is None:
            whole = ((key, [0] * x.ndim, x) for key, x in contents.tensors.items())
            with contents.begun() as folder:
                contents.write(folder, whole)
        else:
            from liger_models.training.checkpoints.saving_together import (
                save_together,  # torch may be built without
            )

            save_together(contents, group)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or contents.target}: cannot be written ({error.strerror or error}). What was "
            "there before is untouched; make room, and go on (a run with --resume)"
        ) from error
