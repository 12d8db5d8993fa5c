"""Which of an operation's two forms runs: its Triton kernel, or its plain PyTorch twin.

Triton takes float16, bfloat16 and float32 tensors on a GPU. Everything else goes to the plain twin: a CPU,
float64, a machine without Triton, tensor subclasses (DTensor, FakeTensor), and code under torch.compile,
where Inductor fuses the twin with its neighbours. Tests on a CPU run the kernels in Triton's interpreter:
see `interpret`.

A kernel file takes `jit`, `tl` and `triton` from here and begins with `from __future__ import annotations`,
so that it can be imported where Triton is not installed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

triton: Any = None
tl: Any = None
try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor

    # Whether a kernel is compiled or interpreted is decided once, where `jit` decorates it.
    interpreted = triton.knobs.runtime.interpret

    def jit(function):
        """triton.jit, for kernels that fuse products with sums unless their launch says otherwise: the bits
        of a result depend on it, and Triton's default on its version and on the environment.
        """
        kernel = triton.jit(function)
        if not interpreted:

            def run(*args, **kwargs):
                kwargs.setdefault("enable_fp_fusion", True)
                return type(kernel).run(kernel, *args, **kwargs)

            kernel.run = run
        return kernel
except ImportError:
    triton = tl = None
    interpreted = False

    def jit(function):
        """Stand in for triton.jit where Triton is not installed: the kernel is never called."""
        return function


_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_NOTHING = nullcontext()
_interpreting = False


def use_triton(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the Triton kernel runs for these tensors; None stands for an absent operand.

    Raises ValueError if they are not all on one device, TypeError if `x` is not a floating point tensor.
    """
    if torch.compiler.is_compiling():
        return False
    if not x.is_floating_point():
        raise TypeError(f"expected a floating point tensor, found {x.dtype}")
    supported = x.dtype in _TRITON_DTYPES and type(x) in _PLAIN_TENSORS
    for other in others:
        if other is None:
            continue
        if other.device != x.device:
            raise ValueError(f"found tensors on {x.device} and on {other.device}; move them to one device")
        supported = supported and type(other) in _PLAIN_TENSORS and other.dtype != torch.float64
    if not supported or triton is None:
        return False
    return _interpreting if interpreted else x.is_cuda


@contextmanager
def interpret() -> Iterator[None]:
    """Run the kernels on CPU tensors in Triton's interpreter. Slow, and meant for tests.

    TRITON_INTERPRET=1 must have been set before Triton was first imported; by itself it changes nothing.
    """
    global _interpreting
    if not interpreted:
        raise RuntimeError("Triton compiles: set TRITON_INTERPRET=1 before the first import of triton")
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Make x's GPU the current one, as a launch needs. Next to free if it already is, or on a CPU."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(x.device)


def early_start(x: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that begins with `wait_for_inputs`: on a Hopper GPU or later its programs
    are set up while the kernel before it still runs ("programmatic dependent launch").

    That saves about 1.5 us between two such kernels, a tenth of the time of a norm of 8192 x 2048.
    """
    if x.is_cuda and not interpreted and _is_hopper_or_later(x.device.index):
        return {"EARLY_START": True, "launch_pdl": True}
    return {"EARLY_START": False}


@functools.cache
def _is_hopper_or_later(device_index: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device_index) >= (9, 0)


@jit
def wait_for_inputs(EARLY_START: tl.constexpr):
    """Wait for the kernel before to end, and let the next be set up. No memory may be touched before."""
    if EARLY_START:
        gdc_wait()
        gdc_launch_dependents()


def rows_to_copy(rows: int, *operands: Tensor) -> list[Any]:
    """What describes tiles of `rows` rows of one head of each operand [T, heads, D] to the copy engine of a
    Hopper GPU (TMA), which fetches them while a program computes: `.load([row, head * D])`, zero beyond the
    tokens. None for all of them where it cannot fetch one: a program then loads element by element.
    """
    described = []
    for x in operands:
        size, dim = x.element_size(), x.shape[2]
        able = size == 2 and dim in (64, 128, 256) and x.stride()[1:] == (dim, 1) and not x.data_ptr() % 16
        apart = x.stride(0) >= x.shape[1] * dim and not x.stride(0) * size % 16  # and no row repeated
        if not able or not apart or (x.is_cuda and not _is_hopper_or_later(x.device.index)):
            return [None] * len(operands)
        described.append(TensorDescriptor(x, [len(x), x.shape[1] * dim], [x.stride(0), 1], [rows, dim]))
    return described


def num_sms(x: Tensor) -> int:
    """Multiprocessors of x's GPU; 2 in the interpreter, so that tests meet more than one program."""
    return _multi_processor_count(x.device.index) if x.is_cuda else 2


@functools.cache
def _multi_processor_count(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def shared_memory(x: Tensor) -> int:
    """Bytes of shared memory that a program may take on x's GPU; on a CPU, a Hopper's."""
    return _shared_memory_per_program(x.device.index) if x.is_cuda else 227 * 1024


@functools.cache
def _shared_memory_per_program(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin  # type: ignore[attr-defined]


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own functions for this and the next take microseconds a call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, of n >= 1."""
    return 1 << (n - 1).bit_length()


def as_rows(x: Tensor) -> Tensor:
    """[..., H] as [rows, H] with an inner stride of one: x or a view where strides permit, else a copy."""
    if x.dim() != 2:
        x = x.reshape(-1 if x.numel() else x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def as_heads(x: Tensor) -> Tensor:
    """[..., heads, D] with an inner stride of one and heads whose offsets fit 32 bits: x, else a copy.

    Those of [heads, T, D], seen as [T, heads, D], lie T D apart: 32 heads of 128 elements and half a million
    tokens are too far.
    """
    *_, head_stride, stride = x.stride()
    return x if stride == 1 and head_stride * x.shape[-2] < 2**31 else x.contiguous()


def contiguous_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous memory of x's shape, and of its dtype if no other is given."""
    if x.is_contiguous():  # then a memory format need not be named, which takes as long as the rest
        return torch.empty_like(x, dtype=dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or as it is if it is float64: the precision in which the plain twins compute."""
    return x if x.dtype == torch.float64 else x.float()


def once_differentiable(backward):
    """A backward pass that raises RuntimeError where it is itself to be differentiated.

    torch's decorator of that name raises only if a gradient that comes in requires one. That of a loss does
    not, and what goes out would be a constant without a word.
    """

    @functools.wraps(backward)
    def run(ctx, *gradients):
        _refuse_create_graph(*gradients)
        return backward(ctx, *gradients)

    return run


def as_once_differentiable(*results: Tensor) -> Any:
    """Results of a plain twin, which from now on refuse what those of a kernel refuse."""
    if not torch.compiler.is_compiling():
        for result in results:
            if result.grad_fn is not None:
                result.grad_fn.register_prehook(_refuse_create_graph)
    return results[0] if len(results) == 1 else results


def _refuse_create_graph(*_) -> None:
    # A backward pass runs with gradients enabled if and only if a graph of it is made.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "the operations of liger_models are differentiable once, and create_graph=True asks for the "
            "gradient of a gradient: leave it away (retain_graph=True keeps the graph for another backward)"
        )


def graph_is_kept() -> bool:
    """In a backward pass: whether it runs with retain_graph=True. Where that cannot be known, assume so."""
    if torch.compiler.is_compiling():
        return True
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if keeps is None else keeps()
