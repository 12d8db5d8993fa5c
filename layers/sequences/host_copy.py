"""Copies to the host for which neither it nor the device waits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A small tensor that is copied to the host while the device continues to work.

    Start the copy early and read it late: by then the device has long made the copy, and still has later work
    queued.
    """

    def __init__(self, tensor: Tensor):
        self._event: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._copy = tensor
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_there(self) -> bool:
        """Whether the value is available without waiting, since the tensor is on the host."""
        return self._event is None

    def tolist(self) -> Any:
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()
