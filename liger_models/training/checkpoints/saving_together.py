"""Write `Contents` from many processes, through torch.distributed.checkpoint.

It distributes the work, so that replicas write a part each, and reports an error of one process to all. The
first process creates the new folder before, and moves it to its target after all have written.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from liger_models.convert.errors import CheckpointError
from liger_models.training.checkpoints.contents import Contents


def save_together(contents: Contents, group: ProcessGroup) -> None:
    """Write a folder from all processes of `group`, which has host collectives.

    Raises:
        OSError, CheckpointError: in all processes if any fails. No new folder exists then.
    """
    with ExitStack() as folder:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        writer = _SharedFiles(contents, folder)
        try:
            dcp.save(contents.tensors, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            rank, (reason, _) = min(error.failures.items())
            if isinstance(reason, OSError | CheckpointError):
                raise reason from None
            raise CheckpointError(f"{contents.target}: process {rank} could not save: {reason!r}") from reason


class _SharedFiles(StorageWriter):
    """Steps of a save, as torch.distributed.checkpoint calls them in every process."""

    def __init__(self, contents: Contents, folder: ExitStack) -> None:
        self.contents, self.folder = contents, folder

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """In the first process: send the new folder's path to all others."""
        new = self.folder.enter_context(self.contents.begun())
        return [replace(plan, storage_data=str(new)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        pieces = (
            (item.index.fqn, item.tensor_data.chunk.offsets, planner.resolve_data(item))
            for item in plan.items
            if item.tensor_data is not None
        )
        self.contents.write(Path(plan.storage_data), pieces)  # type: ignore[arg-type]
        written: Future[list[WriteResult]] = Future()
        written.set_result([])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """In the first process, after all have written."""
        self.folder.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # for a single folder, without an id
