"""Choose between an operation's two forms: its Triton kernel or its plain PyTorch twin.

Triton takes float16, bfloat16 and float32 tensors on a GPU. Everything else goes to the plain twin: CPU
tensors, NVIDIA's GPUs before Ampere (for which Triton has no matrix products), float64, machines without
Triton, tensor subclasses (DTensor, FakeTensor), and code under torch.compile, where Inductor fuses the twin
with its neighbours. Tests on a CPU run the kernels in Triton's interpreter: see `interpret`.

Kernel files import `jit`, `tl` and `triton` from here and begin with `from __future__ import annotations`, so
that they can be imported without Triton.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._gpu import gpu, gpu_of, imagined, on_gpu

# Parameters of kernels: numbers of tokens, and what follows from them.
_VARYING = {
    *("tokens", "rows", "num_rows", "slots", "chunks", "segment_count", "documents", "boundary_count"),
    *("first_row", "table_rows", "most", "programs", "q_tile_count", "k_tile_count"),
    *("number_of_keys", "first_tile"),
}

triton: Any = None
tl: Any = None
ROCM = torch.version.hip is not None
if importlib.util.find_spec("triton") is not None:  # a broken Triton is an error, and no reason to run slowly
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor

    # Whether a kernel is compiled or interpreted is fixed when `jit` decorates it.
    interpreted = triton.knobs.runtime.interpret

    def jit(function):
        """triton.jit with multiply-add fusion on by default. Triton's own default depends on its version and
        the environment, and changes the bits of results.

        A kernel is not specialised to counts that differ from batch to batch: it would be compiled once for
        multiples of 16, once for others, and once for 1.
        """
        varying = [name for name in inspect.signature(function).parameters if name in _VARYING]
        kernel = triton.jit(function, do_not_specialize=varying)
        if not interpreted:
            ahead: list[Any] = []  # compilations of this kernel that have begun (`_ahead.py`)

            def run(*args, **kwargs):
                kwargs.setdefault("enable_fp_fusion", True)
                if ROCM and "num_warps" in kwargs:
                    kwargs["num_warps"] = min(
                        kwargs["num_warps"], gpu(torch.cuda.current_device()).most_warps
                    )
                if imagined.get() is not None:
                    found = type(kernel).run(kernel, *args, **{**kwargs, "warmup": True})
                    if hasattr(found, "result"):
                        ahead.append(found)
                    return found
                for begun in tuple(ahead):
                    _wait_for(begun, kernel)
                    with suppress(ValueError):  # another thread has waited for it
                        ahead.remove(begun)
                return type(kernel).run(kernel, *args, **kwargs)

            kernel.run = run
        return kernel
else:
    interpreted = False

    def jit(function):
        """Placeholder for triton.jit without Triton: the kernel is never called."""
        return function


def _wait_for(begun: Any, kernel: Any) -> None:
    """Wait for a compilation. If it fails, forget it: a launch then compiles again, and raises its error."""
    if begun.result(ignore_errors=True) is None:
        for kernels, *_ in kernel.device_caches.values():
            for key in [key for key, found in kernels.items() if found is begun]:
                kernels.pop(key, None)


_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_NOTHING = nullcontext()
_interpreting = False


def use_triton(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether the Triton kernel runs for these tensors; None means an absent operand.

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
    return _interpreting if interpreted else runs_kernels(x)


def runs_kernels(x: Tensor) -> bool:
    """Whether Triton kernels run on x's device."""
    if triton is None or interpreted or not on_gpu(x):
        return False
    return has_matrix_units(x.device) if x.is_cuda else gpu_of(x).matrix_units


def has_matrix_units(device: torch.device) -> bool:
    """Whether a GPU has matrix units that Triton and torch's fused attention use, and bfloat16: AMD's, and
    NVIDIA's from Ampere on.
    """
    if torch.compiler.is_compiling():  # which knows this call, and no cache
        return ROCM or torch.cuda.get_device_properties(device).major >= 8
    return gpu(device.index).matrix_units


@contextmanager
def interpret() -> Iterator[None]:
    """Run the kernels on CPU tensors in Triton's interpreter. Slow, and meant for tests.

    TRITON_INTERPRET=1 must be set before Triton is first imported; the variable by itself changes nothing.
    """
    global _interpreting
    if not interpreted:
        raise RuntimeError("Triton is compiling: set TRITON_INTERPRET=1 before the first import of triton")
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Make x's GPU the current device for a launch. Nearly free if it already is, or on a CPU."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(x.device)


def early_start(x: Tensor) -> dict[str, bool]:
    """Launch options for a kernel that begins with `wait_for_inputs`: from Hopper on, its programs are set up
    while the previous kernel still runs (programmatic dependent launch).

    Saves about 1.5 us between two such kernels, a tenth of the time of a norm of 8192 x 2048.
    """
    if on_gpu(x) and not interpreted and gpu_of(x).starts_early:
        return {"EARLY_START": True, "launch_pdl": True}
    return {"EARLY_START": False}


@jit
def wait_for_inputs(EARLY_START: tl.constexpr):
    """Wait for the previous kernel to end, and let the next be set up. Touch no memory before this call."""
    if EARLY_START:
        gdc_wait()
        gdc_launch_dependents()


def rows_to_copy(rows: int, *operands: Tensor, columns: int | None = None, padded: bool = False) -> list[Any]:
    """Tensor descriptors for tiles of `rows` rows of one head of each operand [T, heads, D], which Hopper's
    copy engine (TMA) fetches while a program computes: `.load([row, head * D])`, zero past the last token. If
    any operand cannot be described, returns None for all, and programs load element by element. `columns`
    makes tiles of a part of a head. `padded` takes heads of other sizes, too, in tiles of the next power of
    two, whose last columns are the next head's, or zero.
    """
    if not gpu_of(operands[0]).starts_early:
        return [None] * len(operands)
    described = []
    for x in operands:
        size, (count, heads, dim), (apart, *within) = x.element_size(), x.shape, x.stride()
        width = next_power_of_2(dim)
        fits = dim == width or (padded and not dim % 8 and not 128 < dim <= 192)
        able = size == 2 and width in (64, 128, 256) and fits
        able = able and within == [dim, 1] and not x.data_ptr() % 16
        # Rows do not overlap.
        if not able or apart < heads * dim or apart * size % 16:
            return [None] * len(operands)
        described.append(TensorDescriptor(x, [count, heads * dim], [apart, 1], [rows, columns or width]))
    return described


def saving_for_one_pass(pack: Any) -> Any:
    """Mark a function that packs tensors for autograd: each backward pass computes them again, and each is
    unpacked once, so that the pass may use their memory. Returns the function.
    """
    pack.saves_for_one_pass = True
    return pack


def saves_for_one_pass() -> bool:
    """Whether tensors that autograd saves now are packed by such a function."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "saves_for_one_pass", False)


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for x's device. torch refuses the question for the meta device."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Turn autocast off for x's device."""
    return _NOTHING if x.is_meta else torch.autocast(x.device.type, enabled=False)


def num_sms(x: Tensor) -> int:
    """Multiprocessors of x's GPU."""
    return gpu_of(x).multiprocessors


def shared_memory(x: Tensor) -> int:
    """Bytes of shared memory available to a program on x's GPU."""
    return gpu_of(x).shared_memory


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. Triton's versions of this and the next function take microseconds a call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def as_rows(x: Tensor) -> Tensor:
    """View [..., H] as [rows, H] with an inner stride of one; copies only if the strides require it."""
    if x.dim() != 2:
        x = x.reshape(-1 if x.numel() else x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def as_heads(x: Tensor) -> Tensor:
    """[..., heads, D] with an inner stride of one and head offsets that fit 32 bits: x, or a copy.

    In a [heads, T, D] tensor viewed as [T, heads, D], heads are T * D elements apart: with 32 heads of 128
    elements, half a million tokens are too many.
    """
    *_, head_stride, stride = x.stride()
    return x if stride == 1 and head_stride * x.shape[-2] < 2**31 else x.contiguous()


def contiguous_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Empty contiguous tensor of x's shape, in `dtype` or x's own."""
    if x.is_contiguous():  # naming a memory format would double the time of this call
        return torch.empty_like(x, dtype=dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or unchanged if it is float64: the precision in which the plain twins compute."""
    return x if x.dtype == torch.float64 else x.float()


def float64_device(device: torch.device) -> torch.device:
    """`device`, or the CPU if it has no float64: MPS."""
    return torch.device("cpu") if device.type == "mps" else device


def once_differentiable(backward):
    """Decorate a backward pass so that differentiating it raises RuntimeError.

    torch's decorator of that name raises only if an incoming gradient requires grad. A loss's gradient does
    not, and the result would silently be a constant.
    """

    @functools.wraps(backward)
    def run(ctx, *gradients):
        _refuse_create_graph(*gradients)
        return backward(ctx, *gradients)

    return run


def as_once_differentiable(*results: Tensor) -> Any:
    """Make results of a plain twin refuse double backward, as results of a kernel do."""
    if not torch.compiler.is_compiling():
        for result in results:
            if result.grad_fn is not None:
                result.grad_fn.register_prehook(_refuse_create_graph)
    return results[0] if len(results) == 1 else results


def _refuse_create_graph(*_) -> None:
    # A backward pass runs with gradients enabled if and only if create_graph is set.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "the operations of liger_models are differentiable once, and create_graph=True asks for the "
            "gradient of a gradient: leave it out (retain_graph=True keeps the graph for another backward)"
        )


def graph_is_kept() -> bool:
    """In a backward pass: whether it runs with retain_graph=True; True if that cannot be determined."""
    if torch.compiler.is_compiling():
        return True
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if keeps is None else keeps()
