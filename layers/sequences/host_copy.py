"""Numbers on their way from a device to the host, without making either wait."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A small tensor that is copied to the host while the device goes on working.

    Ask for the copy early and read it late: by then the device has long passed the place of the copy, and has
    the work queued behind it still to do.
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
        """Whether nothing has to be waited for, since the tensor is the host's."""
        return self._event is None

    def tolist(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()
