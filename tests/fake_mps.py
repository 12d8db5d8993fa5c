"""MPS, imitated on any machine: tensors in CPU memory that say they are on MPS, and refuse what MPS lacks.

    with fake_mps():
        x = torch.zeros(3, device="mps")

Refused are float64, operations on tensors of both devices, copies that do not wait (which on MPS may read
memory that was freed), and operations for which torch's own table of kernels has none for MPS.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

MPS = torch.device("mps", 0)
_aten = torch.ops.aten
_WITH_INDICES = {_aten.index.Tensor, _aten.index_put_.default}  # which may be on the host
_BETWEEN = {_aten._to_copy.default, _aten.copy_.default, _aten._local_scalar_dense.default}


class OnMps(Tensor):
    """A tensor on imitated MPS."""

    @staticmethod
    def __new__(cls, memory: Tensor) -> OnMps:
        if memory.dtype in (torch.float64, torch.complex128):
            raise TypeError("MPS has no float64")
        return Tensor._make_subclass(cls, memory)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnMps({self.cpu()})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch's own code takes it for a tensor on a CPU, and would leave out copies to one.
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return MPS
        if func in (Tensor.is_cpu.__get__, Tensor.is_mps.__get__):  # type: ignore[attr-defined]
            return func == Tensor.is_mps.__get__  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            if func == Tensor.cpu:
                return _aten._to_copy(args[0], device=torch.device("cpu"))
            if func == Tensor.tolist:
                return _aten._to_copy(args[0], device=torch.device("cpu")).tolist()
            if func == Tensor.to:
                return _moved(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Moves(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch looks for the device itself before it asks a mode.
        run = _moved if func == Tensor.to and type(args[0]) in (Tensor, torch.nn.Parameter) else func
        return run(*args, **(kwargs or {}))


def _generator(device: Any = "cpu", made: Any = torch.Generator) -> torch.Generator:
    return made("cpu" if torch.device(device).type == "mps" else device)


@contextmanager
def fake_mps(any_operation: bool = False) -> Iterator[None]:
    """Make tensors on MPS where a function is asked for them, and let torch say that it is there.

    Args:
        any_operation: do not ask torch's table of kernels, which takes seconds to read.
    """
    import torch._dynamo

    with ExitStack() as stack:
        if any_operation:
            stack.enter_context(mock.patch(f"{__name__}._has_kernel", return_value=True))
        for where, name, instead in (
            (torch.backends.mps, "is_available", lambda: True),
            *((torch.mps, name, getattr(torch, name)) for name in ("get_rng_state", "set_rng_state")),
            (torch.mps, "manual_seed", torch.default_generator.manual_seed),
            (torch.mps, "synchronize", lambda: None),
            (torch, "Generator", _generator),
            # A parameter moved to MPS is of another class.
            (torch.__future__, "_overwrite_module_params_on_conversion", True),
        ):
            stack.enter_context(mock.patch.object(where, name, instead))
        stack.enter_context(_Operations())
        stack.enter_context(_Moves())
        yield


def _moved(x: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    """`x.to(...)`."""
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    if args and isinstance(args[0], OnMps):
        device = MPS
    here = MPS if isinstance(x, OnMps) else torch.device("cpu")
    device, dtype = here if device is None else device, dtype or x.dtype
    if (device.type, dtype, copy) == (here.type, x.dtype, False):
        return x
    return _aten._to_copy(x, device=device, dtype=dtype, non_blocking=non_blocking)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = [x for x in given if isinstance(x, OnMps)]
    asked = kwargs.get("device") and torch.device(kwargs["device"]).type
    if not here and asked != "mps":
        return func(*args, **kwargs)
    if func not in _BETWEEN | _WITH_INDICES and any(x.dim() and not isinstance(x, OnMps) for x in given):
        raise RuntimeError(f"{func} got tensors on MPS and on the host")
    if func in _BETWEEN and (kwargs.get("non_blocking") or args[2:] == (True,)):
        raise RuntimeError("a copy does not wait, and may read freed memory on MPS")
    if not _has_kernel(func):
        raise NotImplementedError(f"{func} has no kernel for MPS")
    # The gradient of a cast goes to the device of what was cast, which torch takes for a CPU.
    of_cast = func is _aten._to_copy.default and torch._C._current_graph_task_id() != -1
    stays = asked == "mps" or ((asked is None or of_cast) and here)
    if asked == "mps":
        kwargs = {**kwargs, "device": torch.device("cpu")}
    with no_dispatch():
        result = func(*args, **kwargs)
        if not stays or func is _aten.copy_.default:
            return result
        return tree_map(lambda x: OnMps(x) if type(x) is Tensor else x, result)


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    import torchgen
    import yaml

    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {entry["func"].split("(")[0]: entry for entry in entries}


@functools.cache
def _has_kernel(func: Any) -> bool:
    entry = _table().get(func.name().removeprefix("aten::"))
    if entry is None:  # not torch's
        return True
    if "structured_delegate" in entry:
        entry = _table()[entry["structured_delegate"]]
    keys = ",".join(entry.get("dispatch", {"CompositeImplicitAutograd": ""})).replace(" ", "").split(",")
    return any(key == "MPS" or key.startswith("Composite") for key in keys)
