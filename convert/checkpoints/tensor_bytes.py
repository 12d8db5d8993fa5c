"""Bytes of tensors: access in pieces of bounded size, directly or through a staging buffer."""

import ctypes
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

PIECE_BYTES = 16 << 20  # per read or write; also the size of a staging buffer


def is_plain_memory(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous()


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it. The tensor must outlive the view."""
    array = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def pieces_of(tensor: Tensor, itemsize: int) -> Iterator[tuple[int, Tensor]]:
    """Views of consecutive elements, each of at most PIECE_BYTES or one element, with the index of their
    first. An element counts as `itemsize` bytes.
    """
    if tensor.dim() == 0 or tensor.numel() * itemsize <= PIECE_BYTES:
        yield 0, tensor
        return
    row = tensor.numel() // tensor.shape[0]
    if step := PIECE_BYTES // (row * itemsize):
        for first in range(0, tensor.shape[0], step):
            yield first * row, tensor[first : first + step]
        return
    for i, part in enumerate(tensor.unbind(0)):
        for first, piece in pieces_of(part, itemsize):
            yield i * row + first, piece


def stage_for(store: threading.local, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous CPU tensor shaped like `like` in the thread's own buffer; pinned if `like` is on a GPU."""
    nbytes = like.numel() * dtype.itemsize
    pinned = like.device.type == "cuda"
    buffer: Tensor | None = getattr(store, "buffer", None)
    if buffer is None or buffer.numel() < nbytes or buffer.is_pinned() != pinned:
        store.buffer = buffer = torch.empty(max(nbytes, PIECE_BYTES), dtype=torch.uint8, pin_memory=pinned)
    return buffer[:nbytes].view(dtype).view(like.shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors have the same bytes; unlike values, correct for NaN and -0.0."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
