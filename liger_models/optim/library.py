"""Optimizers of other libraries, next to our AdamW and with its treatment of bfloat16 weights.

| name       | class                         | updates                                                      |
|------------|-------------------------------|--------------------------------------------------------------|
| adamw_8bit | bitsandbytes.optim.AdamW8bit  | everything; moments in 8 bits, with a scale per 256 elements |
| muon       | torch.optim.Muon              | matrices; everything else is updated by our AdamW            |
| adafactor  | torch.optim.Adafactor         | everything; a row and a column instead of a second moment    |
| sgd        | torch.optim.SGD               | everything; with momentum                                    |

The library's own `step` updates one parameter after another, in float32: a bfloat16 weight is widened by the
16 bits that are kept of it ("master", see docs/optimizer.md), updated and split again, so that steps smaller
than bfloat16's spacing are not lost. A fused parameter (query, key and value; gate and up; all experts) is
updated as its separate matrices, which are views of it: orthogonalising the whole, or taking the mean of its
columns, would be another algorithm than the library's on a model with separate projections.

A DTensor is gathered, updated whole by every rank, and sharded again, one parameter at a time. Its state is
sharded where it has the parameter's shape, and replicated otherwise. The result is that of one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.expressions import Expr
from liger_models.convert.errors import ConfigError
from liger_models.optim.adamw import AdamW, _gradient, _is_dtensor, _local

OPTIMIZERS = ("adamw", "adamw_8bit", "muon", "adafactor", "sgd")
LIBRARY_WEIGHTS = ("master", "plain")  # of WEIGHTS, for all but our AdamW
SPLIT = ("muon", "adafactor")  # not elementwise: a fused parameter is updated as its separate matrices
MIN_8BIT_SIZE = 4096  # elements; bitsandbytes keeps the moments of smaller tensors in float32
QUANTISED_BLOCK = 256

MOMENTUM = 0.9  # of SGD
MUON_MOMENTUM = 0.95


def make_library_optimizer(
    name: str, parameters: list[Tensor], *, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """The optimizer of this name with this package's settings; learning rate and weight decay are set later.

    Muon scales its updates to the size of AdamW's (Liu et al., 2025, arXiv:2502.16982), so that both have one
    learning rate and one weight decay.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    if name == "adamw_8bit":
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError as error:
            raise ConfigError(
                "optimizer adamw_8bit requires bitsandbytes: pip install 'liger_models[quantize]'"
            ) from error
        return AdamW8bit(parameters, betas=betas, eps=eps, min_8bit_size=MIN_8BIT_SIZE)
    if name == "muon":
        return torch.optim.Muon(parameters, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw")
    if name == "adafactor":
        return torch.optim.Adafactor(parameters)
    if name == "sgd":
        return torch.optim.SGD(parameters, momentum=MOMENTUM)
    raise ValueError(f"optimizer is {name!r}; expected one of {', '.join(OPTIMIZERS[1:])}")


class LibraryOptimizer(AdamW):
    """AdamW in which a library's optimizer updates some parameters.

    Args:
        params: groups of parameters. Those with `library`, a name of `OPTIMIZERS`, are updated by that
            optimizer, the others by AdamW.
        forms: of fused parameters, the expressions by which they are split (canonical forms, see
            convert/checkpoints/layout.py).

    Other arguments are AdamW's. `clip_grad_norm` is also AdamW's: the next step scales the gradients.
    """

    def __init__(
        self, params: list[dict[str, Any]], *args: Any, forms: Mapping[Tensor, Expr], **options: Any
    ) -> None:
        super().__init__([{"library": None, **group} for group in params], *args, **options)
        self._forms = dict(forms)
        self._libraries: dict[str, torch.optim.Optimizer] = {}
        for group in self.param_groups:
            if name := group["library"]:
                stand_in = [torch.zeros(2, 2)]
                settings = {key: group[key] for key in ("betas", "eps")}
                self._libraries[name] = make_library_optimizer(name, stand_in, **settings)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not supported: a run's checkpoints contain the state, see training/checkpoints/state.py."""
        raise TypeError("the state of library optimizers is restored from a run's checkpoint (--resume)")

    def new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any] | None:
        """State of a parameter before its first step, for the whole parameter; None if AdamW updates it."""
        if group["library"] is None:
            return None
        wide = torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype
        whole = torch.zeros(parameter.shape, dtype=wide, device=parameter.device)
        state: dict[str, Any] = {}
        if _keeps_residue(group, parameter):
            state["residue"] = torch.zeros(parameter.shape, dtype=torch.int16, device=parameter.device)
        return state | self._run({**group, "lr": 0.0}, parameter, whole, torch.zeros_like(whole), {})

    def _step_group(self, group: dict[str, Any], places: Iterator[int], *scaling: Any) -> None:
        if group["library"] is None:
            super()._step_group(group, places, *scaling)
            return
        for parameter, _ in zip(group["params"], places):  # noqa: B905 (the places go on)
            if parameter.grad is not None:
                self._update(group, parameter)

    def _update(self, group: dict[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state and _keeps_residue(group, parameter):
            state["residue"] = torch.zeros_like(parameter, dtype=torch.int16)
        residue = _local(state["residue"]) if "residue" in state else None
        own = _local(parameter.detach())
        wide = _widened(own, residue) if own.dtype == torch.bfloat16 else own
        gradient = _gradient(parameter).to(wide.dtype)
        if (factor := self._factors.get(gradient.device)) is not None:
            gradient = gradient * factor
        whole = _gathered(wide, parameter)
        kept = {key: _whole(value) for key, value in state.items() if key != "residue"}
        kept = self._run(group, parameter, whole, _gathered(gradient, parameter), kept)
        state |= {key: _sharded(value, parameter) for key, value in kept.items()}
        updated = _local(_sharded(whole, parameter))
        if own.dtype == torch.bfloat16:
            _narrow(updated, own, residue)
        elif updated is not own:
            own.copy_(updated)

    def _run(
        self,
        group: dict[str, Any],
        parameter: Tensor,
        whole: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
    ) -> dict[str, Any]:
        """Take the library's step on the values of one parameter, in place. Returns its new state."""
        form = self._forms.get(parameter) if group["library"] in SPLIT else None

        def split(tensor: Tensor) -> list[Tensor]:
            return [tensor] if form is None else [place.view for place in form.places(tensor)]

        pieces = [piece.detach() for piece in split(whole)]
        for piece, part in zip(pieces, split(gradient), strict=True):
            piece.grad = part
        library = self._libraries[group["library"]]
        settings = {key: group[key] for key in ("lr", "weight_decay")}
        library.param_groups = [{**library.defaults, **settings, "params": pieces}]
        states = _split_state(state, split, len(pieces))
        library.state = defaultdict(dict, zip(pieces, states, strict=True))
        library.step()
        states = [library.state[piece] for piece in pieces]
        library.param_groups, library.state = [], defaultdict(dict)
        return _joined_state(states, pieces, split, whole)


def library_state_bytes(
    name: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, weights: str
) -> float:
    """Bytes of a library optimizer's state for parameters of these shapes; fused ones as separate matrices
    where the optimizer splits them.
    """
    total = 0.0
    for shape in shapes:
        count = torch.Size(shape).numel()
        if name == "adamw_8bit":
            total += 8 * count if count < MIN_8BIT_SIZE else 2 * count + 8 * -(-count // QUANTISED_BLOCK)
        elif name == "adafactor" and len(shape) > 1:
            total += 4 * (count // shape[-1] + count // shape[-2])
        else:
            total += 4 * count
        total += 2 * count if dtype == torch.bfloat16 and weights == "master" else 0
    return total


def library_work(name: str, largest: int, dtype: torch.dtype) -> int:
    """Bytes that a step takes for a while, for the largest parameter's number of elements: in float32 its
    gradient, its value if that is in bfloat16, and the library's intermediate results.
    """
    results = {"adamw_8bit": 0, "muon": 10, "adafactor": 8, "sgd": 4}[name]
    return largest * (4 + results + (4 if dtype == torch.bfloat16 else 0))


# ------------------------------------------------------------------------------------------------- the state


def _split_state(
    state: dict[str, Any], split: Callable[[Tensor], list[Tensor]], count: int
) -> list[dict[str, Any]]:
    """Divide a parameter's state among its pieces. Values named `<key>.<number>` belong to one piece."""
    if count == 1:
        return [state]
    states: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in state.items():
        key, _, number = name.rpartition(".")
        if key:
            states[int(number)][key] = value
        else:
            for own, part in zip(states, split(value), strict=True):
                own[name] = part
    return states


def _joined_state(
    states: list[dict[str, Any]],
    pieces: list[Tensor],
    split: Callable[[Tensor], list[Tensor]],
    whole: Tensor,
) -> dict[str, Any]:
    """Inverse of `_split_state`. Values of the pieces' shapes become one tensor of the parameter's shape."""
    if len(states) == 1:
        return states[0]
    joined: dict[str, Any] = {}
    for key, first in states[0].items():
        values = [state[key] for state in states]
        if isinstance(first, Tensor) and all(
            value.shape == piece.shape for value, piece in zip(values, pieces, strict=True)
        ):
            joined[key] = torch.empty(whole.shape, dtype=first.dtype, device=first.device)
            for part, value in zip(split(joined[key]), values, strict=True):
                part.copy_(value)
        else:
            joined |= {f"{key}.{number}": value for number, value in enumerate(values)}
    return joined


# ---------------------------------------------------------------------------------------- bfloat16 and shards


def _keeps_residue(group: dict[str, Any], parameter: Tensor) -> bool:
    return parameter.dtype == torch.bfloat16 and group["weights"] == "master"


def _widened(own: Tensor, residue: Tensor | None) -> Tensor:
    """The float32 weight whose upper half is `own` and whose lower half is `residue`."""
    wide = own.float()
    if residue is not None:
        wide.view(torch.int32).add_(residue)
    return wide


def _narrow(wide: Tensor, own: Tensor, residue: Tensor | None) -> None:
    """Inverse of `_widened`, into `own` and `residue`. Ties round away from zero, as in AdamW's kernel: the
    residue is then the lower half, with a sign.
    """
    if residue is None:
        own.copy_(wide)
        return
    nan = wide.isnan()
    bits = wide.contiguous().view(torch.int32)
    residue.copy_(bits.masked_fill(nan, 0))
    own.view(torch.int16).copy_((bits + 0x8000) >> 16)
    own.masked_fill_(nan, torch.nan)  # a carry would turn some NaNs into zeros


def _gathered(own: Tensor, parameter: Any) -> Tensor:
    """The whole tensor of which `own` is this rank's part, for a parameter; all ranks must call this."""
    if not _is_dtensor(parameter):
        return own
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    shape: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(own, mesh, placements, run_check=False, **shape).full_tensor()


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, Tensor) and _is_dtensor(value) else value  # type: ignore[attr-defined]


def _sharded(value: Any, parameter: Any) -> Any:
    """Shard a whole value as its parameter is, if it has the parameter's shape."""
    if not _is_dtensor(parameter) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    whole = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=parameter.placements)
