"""Compilation of an operation's kernels side by side, before it first runs.

The operation runs forward and backward once on tensors of the meta device, which have shapes and no data. Its
launches compile, in the threads of a pool, and launch nothing. Then it runs on the GPU, and waits for each
kernel when it launches it. Otherwise each kernel is compiled at its first launch, after the one before it.

An operation is one call of `moe_experts`, the layers and the head of a model (layers/model/first_step.py), or
a step of an optimizer (liger_models/optim/first_step.py).

The first step of two layers of Qwen3-30B-A3B with adapters on all experts, 4 x 4096 tokens, with nothing
compiled before, took 3.4 s on an H200 and 10 cores (forward 3.0, backward 0.4, optimizer 0.05); with the
experts' kernels side by side and launchers made one by one it took 14.2 s; compiled before, 1.2 s. In the
first process on another machine it took 6.4 s: cuDNN's first calls took 2.0 s there, and 0.3 s in later ones.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from liger_models.kernels._dispatch import interpreted, triton
from liger_models.kernels._gpu import gpu_of, imagined

MOST_THREADS = 16

_compiled: set[Hashable] = set()
# Where an operation is imagined that itself calls `compile_ahead`.
_device: ContextVar[torch.device | None] = ContextVar("device", default=None)


def compile_ahead(operation: Callable[..., Tensor], key: Hashable, *operands: Any) -> None:
    """Begin to compile what `operation(*operands)` and its backward pass launch on their GPU.

    Args:
        operation: returns a tensor; reads no values of its operands.
        key: of all that decides which kernels run. The second call with the same key does nothing.
        operands: tensors, sequences and named tuples of them, and anything else; the first is a tensor.
    """
    first: Tensor = operands[0]
    key = operation, key, _device.get() or first.device
    if key in _compiled or interpreted or not (first.is_cuda or _device.get()):
        return
    _compiled.add(key)
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or imagined.get() is not None:
        return

    pool = _Pool(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="compilation")

    def run() -> None:
        mode(pool).__enter__()  # and never left, which would wait for the compilations
        imagined.set(gpu_of(first))
        _device.set(first.device)
        # Hooks of the caller, such as a checkpoint's, see nothing of this.
        with torch.enable_grad(), saved_tensors_hooks(as_it_is, as_it_is), torch.cuda.device(first.device):
            out = operation(*map(_imagine, operands))
            if out.requires_grad:
                out.backward(torch.empty_like(out))

    with suppress(Exception):  # an error appears when the operation runs, which then compiles what is left
        contextvars.copy_context().run(run)
    pool.shutdown(wait=False)  # its threads end with their work


class _Pool(ThreadPoolExecutor):
    """Threads that compile kernels and what launches them: until Triton 3.6 a C program for each signature,
    which takes the C compiler as long as a small kernel takes Triton.
    """

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        return super().submit(_with_launcher, compile_kernel)


def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    with suppress(Exception):  # an error appears when the kernel is launched
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)  # and keeps it on the disk
    return kernel


def as_it_is(x: Tensor) -> Tensor:
    """Hook of an imagined operation on what autograd saves."""
    return x


def _imagine(x: Any) -> Any:
    """The same on the meta device."""
    if isinstance(x, Tensor):
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return like.requires_grad_(x.requires_grad)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(_imagine, x))
    return [*map(_imagine, x)] if isinstance(x, list | tuple) else x
