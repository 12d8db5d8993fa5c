"""AdamW for training loops, with float32-quality bfloat16 weights and built-in clipping.

    optimizer = liger_models.optim.AdamW(model.parameters(), lr=1e-5)
    for input_ids in batches:
        model(input_ids, labels=input_ids).loss.backward()
        norm = optimizer.clip_grad_norm(1.0)      # reads the gradients without changing them
        optimizer.step()                          # applies the clipping factor
        optimizer.zero_grad()

See kernels/optimizer/adamw.py for the meaning of `weights`, and docs/optimizer.md for
measurements.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from liger_models.kernels._dispatch import float64_device, use_triton
from liger_models.kernels.optimizer.adamw import (
    RESIDUE_DTYPES,
    WEIGHTS,
    AdamWSettings,
    AdamWTensors,
    adamw,
    prepare_adamw,
)
from liger_models.kernels.optimizer.sum_of_squares import sum_of_squares_plain
from liger_models.optim.dtensors import is_dtensor, local
from liger_models.optim.first_step import compile_first_step
from liger_models.optim.host_state import adamw_from_host, room_on_host, state_on_host
from liger_models.optim.prepared import Prepared, Update, operands_of, plain_gradients

MOMENTS = ("auto", "float32", "bfloat16")


def state_bytes(dtype: torch.dtype, weights: str = "master", moments: str = "auto") -> int:
    """Bytes of `AdamW` state per element: two moments, and the residue of bfloat16 weights."""
    moment = dtype if moments == "auto" else getattr(torch, moments)
    residue = RESIDUE_DTYPES.get(weights) if dtype == torch.bfloat16 else None
    return 2 * moment.itemsize + (0 if residue is None else residue.itemsize)


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, 2019) in one pass over parameters, gradients and state.

    Args:
        params: parameters, or groups of them with their own settings, as for any torch optimizer; float32,
            bfloat16 or float64, on any devices. DTensors (FSDP2) are supported: each rank updates its shard.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        weights: update of bfloat16 weights: "master", "compensated", "stochastic" or "plain", see
            docs/optimizer.md. No effect on float32 weights.
        moments: dtype of both moments: "auto" (the parameter's), "float32" or "bfloat16".
        seed: for stochastic rounding. The random bits are a function of the seed, the step, the parameter's
            index in `params` and the element's index in the parameter: a resumed run draws the same bits, and
            so does every shard of a DTensor sharded along its first dimension. Other shardings round equally
            well, but with other bits than the whole.
        state_device: "cpu" keeps the state in pinned host memory and streams it through the GPU in each step:
            see host_state.py. Results are bitwise equal; each step synchronises the device. Each rank holds
            the state of its shards of DTensors. None: on the parameters' devices.

    Parameters on MPS, which has no float64, are updated on the host: a CPU's bits, in more time.

    A group's learning rate may change between steps; its other settings are called "betas", "eps",
    "weight_decay", "weights", "moments" and "seed". The state of a parameter is exp_avg, exp_avg_sq and step,
    as in torch's fused AdamW, and for bfloat16 weights "residue", the rounding error.

    With torch.amp.GradScaler the kernel unscales and skips steps without synchronising the device; unlike
    torch's fused AdamW, it does not modify the gradients.

    Raises:
        ValueError: a setting out of range; parameters that are not dense in memory.
        TypeError: an unsupported parameter dtype; a tensor as learning rate.
    """

    _step_supports_amp_scaling = True  # makes GradScaler set grad_scale and found_inf
    state_device: str | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        weights: str = "master",
        moments: str = "auto",
        seed: int = 0,
        state_device: str | None = None,
    ) -> None:
        if state_device not in (None, "cpu"):
            raise ValueError(f"state_device is {state_device!r}; expected 'cpu' or None")
        self.state_device = state_device
        self._factors: dict[torch.device, Tensor] = {}
        self._prepared = Prepared()
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings | {"weights": weights, "moments": moments, "seed": seed})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_settings(group)
        for parameter in group["params"]:
            _check_parameter(parameter)
            if self.state_device is not None and parameter.device.type == "mps":
                raise ValueError("state_device is 'cpu', but MPS shares the host's memory: leave it out")
        if self.state_device is None:
            compile_first_step(group, _settings(group))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step, applying the factor of `clip_grad_norm` if that was called since the last step.

        Args:
            closure: recomputes the loss, as for any torch optimizer.

        Returns:
            The result of `closure`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        places = itertools.count()
        for group in self.param_groups:
            self._step_group(group, places, grad_scale, found_inf)
        self._factors = {}
        return loss

    def _step_group(
        self, group: dict[str, Any], places: Iterator[int], grad_scale: Any, found_inf: Any
    ) -> None:
        for device, steps, run in self._updates(group, list(itertools.islice(places, len(group["params"])))):
            factor = self._factors.get(device)
            if grad_scale is not None:
                unscaling = grad_scale.to(device, torch.float32, non_blocking=True).reciprocal()
                factor = unscaling if factor is None else factor * unscaling
            skip = None if found_inf is None else found_inf.to(device, torch.float32, non_blocking=True)
            torch._foreach_add_(steps, 1.0)
            run(_settings(group), factor, skip)
            if skip is not None:
                torch._foreach_sub_(steps, [skip.reshape(()).sign()] * len(steps))

    def _updates(self, group: dict[str, Any], places: list[int]) -> list[Update]:
        """The updates of a group whose parameters have these places in the optimizer, one a device."""

        def make() -> tuple[list[Update], bool]:
            by_device: dict[torch.device, list[AdamWTensors]] = {}
            for parameter, place in zip(group["params"], places, strict=True):
                if parameter.grad is not None:
                    tensors = self._tensors(parameter, group, place)
                    by_device.setdefault(tensors.parameter.device, []).append(tensors)
            updates, lasting = [], True
            for device, updated in by_device.items():
                launches = None if operands is None else prepare_adamw(updated, _settings(group))
                run = adamw if self.state_device is None else adamw_from_host
                lasting &= launches is not None
                steps = [one.step for one in updated]
                updates.append(Update(device, steps, launches or functools.partial(run, updated)))
            return updates, lasting

        operands = None if self.state_device else operands_of(group, self.state, places)
        return self._prepared.updates(places[0] if places else 0, operands, make)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._factors = {}  # the factors belong to the old gradients
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Return the total gradient norm; the next step scales the gradients to at most max_norm.

        Gradients are read once and not modified: `step` multiplies by min(1, max_norm / norm), as
        torch.nn.utils.clip_grad_norm_ does. Call this after the last backward pass of a step and, with a
        GradScaler, after its `unscale_`. Does not synchronise the device.

        Returns:
            The Euclidean norm, a float32 0-d tensor on the first parameter's device. For DTensors it is the
            norm of the full gradients, on every rank: all ranks must call this.
        """
        parameters = list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))
        norm, self._factors = _norm_and_factors(parameters, max_norm, self._prepared)
        return norm

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as in torch, but keep every tensor's dtype, and check that this optimizer can continue from
        it.

        Raises:
            ValueError: a parameter's state has another shape or dtype than its group's settings require.
        """
        # torch would cast the state to the parameter's dtype and move all of it to its device.
        super().load_state_dict({**state_dict, "state": {}})
        saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for group in self.param_groups:
            _check_settings(group)
            for parameter, place in zip(group["params"], saved):  # noqa: B905 (saved goes on)
                if place in state_dict["state"]:
                    given = state_dict["state"][place]
                    _check_state(parameter, group, given, place)
                    self.state[parameter] = {
                        name: self._placed(name, value, parameter) for name, value in given.items()
                    }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._factors, self._prepared = {}, Prepared()
        for group in self.param_groups:  # missing in a state of torch.optim.AdamW
            for name in ("weights", "moments", "seed"):
                group.setdefault(name, self.defaults[name])

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"state_device": self.state_device}  # type: ignore[no-untyped-call]

    def _placed(self, name: str, value: Tensor, parameter: Tensor) -> Tensor:
        """Move a part of the state to its device."""
        if self.state_device is None or name == "step":
            return value.to(parameter.device)
        return state_on_host(value, parameter)

    def _tensors(self, parameter: Tensor, group: dict[str, Any], place: int) -> AdamWTensors:
        if not self.state[parameter]:
            self.state[parameter] = {
                name: torch.zeros((), dtype=dtype, device=parameter.device)
                if name == "step"
                else self._zeros(parameter, dtype)
                for name, dtype in _state_dtypes(parameter, group).items()
            }
        elif self.state_device is not None:  # a loaded state may be elsewhere
            state = self.state[parameter]
            state.update({name: self._placed(name, value, parameter) for name, value in state.items()})
        state = {name: local(value) for name, value in self.state[parameter].items()}
        moments = _flat(state["exp_avg"]), _flat(state["exp_avg_sq"])
        residue = _flat(state["residue"]) if "residue" in state else None
        tensors = _flat(local(parameter)), _flat(_gradient(parameter)), *moments, state["step"], residue
        return AdamWTensors(*tensors, place, _first_element(parameter))

    def _zeros(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Initial moment or residue, with the parameter's memory layout."""
        if self.state_device is None:
            return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
        room = room_on_host(parameter, dtype)
        local(room).zero_()
        return room


def _check_settings(group: dict[str, Any]) -> None:
    def check(name: str, good: bool, expected: str) -> None:
        if not good:
            raise ValueError(f"{name} is {group[name]!r}; expected {expected}")

    if isinstance(group["lr"], Tensor):
        raise TypeError("lr is a tensor; expected a number (it may change from step to step)")
    check("lr", group["lr"] >= 0, "0 or more")
    check(
        "betas", all(0 <= beta < 1 for beta in group["betas"]), "two numbers from 0 up to, not including, 1"
    )
    check("eps", group["eps"] >= 0, "0 or more")
    check("weight_decay", group["weight_decay"] >= 0, "0 or more")
    check("weights", group["weights"] in WEIGHTS, f"one of {', '.join(WEIGHTS)}")
    check("moments", group["moments"] in MOMENTS, f"one of {', '.join(MOMENTS)}")
    check("seed", abs(group["seed"]) < 2**63, "a 64-bit integer")


def _check_parameter(parameter: Tensor) -> None:
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float64):
        hint = "; load the model in bfloat16 or float32" if parameter.dtype == torch.float16 else ""
        raise TypeError(f"a parameter is {parameter.dtype}; expected float32, bfloat16 or float64{hint}")
    own = local(parameter.detach())
    if torch.empty_like(own, device="meta").stride() != own.stride():
        raise ValueError(
            f"a parameter of {tuple(own.shape)} with strides {own.stride()} has gaps or overlaps in "
            "memory; make it contiguous"
        )


def _settings(group: dict[str, Any]) -> AdamWSettings:
    names = ("eps", "weight_decay", "weights", "seed")
    return AdamWSettings(group["lr"], *group["betas"], *(group[name] for name in names))


def _state_dtypes(parameter: Tensor, group: dict[str, Any]) -> dict[str, torch.dtype]:
    """State tensors of a parameter, and their dtypes."""
    moment = parameter.dtype if group["moments"] == "auto" else getattr(torch, group["moments"])
    dtypes = {"step": torch.float32, "exp_avg": moment, "exp_avg_sq": moment}
    if parameter.dtype == torch.bfloat16 and group["weights"] in RESIDUE_DTYPES:
        dtypes["residue"] = RESIDUE_DTYPES[group["weights"]]
    return dtypes


def _check_state(parameter: Tensor, group: dict[str, Any], given: dict[str, Any], place: Any) -> None:
    expected = _state_dtypes(parameter, group)
    if given.keys() != expected.keys():
        raise ValueError(
            f"the state of parameter {place} is {', '.join(sorted(given))}; a {parameter.dtype} one with "
            f"weights={group['weights']!r} has {', '.join(sorted(expected))}"
        )
    for name, dtype in expected.items():
        shape = () if name == "step" else tuple(parameter.shape)
        found = given[name]
        if tuple(found.shape) != shape or found.dtype != dtype:
            raise ValueError(
                f"{name} of parameter {place} is {found.dtype} {tuple(found.shape)}; expected {dtype} {shape}"
            )


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place so that their norm is at most max_norm, for any optimizer, as
    torch.nn.utils.clip_grad_norm_. Also works with expert parallelism, where experts and other parameters are
    DTensors on two meshes, whose norms torch cannot add ("must have the same mesh").

    Returns:
        The Euclidean norm before clipping, as `AdamW.clip_grad_norm`: all ranks must call this.
    """
    parameters = [p for p in parameters if p.grad is not None]
    if not parameters:
        return torch.zeros(())
    norm, factors = _norm_and_factors(parameters, max_norm, Prepared())
    for p in parameters:
        gradient = local(p.grad)
        gradient.mul_(factors[gradient.device])
    return norm


def _norm_and_factors(
    parameters: list[Tensor], max_norm: float, prepared: Prepared
) -> tuple[Tensor, dict[Any, Tensor]]:
    """Norm of the gradients on the first parameter's device, and each device's clipping factor."""
    shards: dict[tuple[Any, ...], list[Tensor]] = {}
    first, used = parameters[0].device, [p for p in parameters if p.grad is not None]
    gradients = plain_gradients(used)
    if gradients is not None and {p.device for p in used} == {first}:
        shards[(first,)] = gradients
    else:
        for parameter in used:
            gradient = _gradient(parameter)
            shards.setdefault((gradient.device, *_divided_over(parameter)), []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=float64_device(first))
    for (_, *groups), gradients in shards.items():
        square = (prepared.sum_of_squares if use_triton(*gradients) else sum_of_squares_plain)(gradients)
        for group in groups:
            torch.distributed.all_reduce(square, group=group)
        total += square.to(total.device)
    norm = total.sqrt().float().to(first)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm, {device: factor.to(device) for device, *_ in shards}


def _gradient(parameter: Any) -> Tensor:
    """This rank's gradient, with the parameter's memory layout."""
    gradient = parameter.grad
    if gradient.is_sparse:
        raise TypeError(
            f"the gradient of a parameter of {tuple(parameter.shape)} is sparse; expected a dense one"
        )
    if is_dtensor(parameter) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    own, gradient = local(parameter), local(gradient)
    if gradient.stride() == own.stride():
        return gradient
    return torch.empty_like(own, dtype=gradient.dtype).copy_(gradient)


def _flat(tensor: Tensor) -> Tensor:
    """View of all elements in memory order, which must be dense."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _first_element(parameter: Any) -> int:
    """Index in the whole parameter of this rank's first element."""
    if not is_dtensor(parameter):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, mesh, placements = parameter.shape, parameter.device_mesh, parameter.placements
    _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return sum(offset * shape[dim + 1 :].numel() for dim, offset in enumerate(offsets))


def _divided_over(parameter: Any) -> Iterable[Any]:
    """Process groups whose ranks hold different parts of a parameter."""
    if not is_dtensor(parameter):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(i) for i, placed in enumerate(parameter.placements) if not placed.is_replicate()
    )


__all__ = ["AdamW", "clip_grad_norm_"]
