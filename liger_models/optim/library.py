"""Optimizers of other libraries, next to our AdamW and with its treatment of bfloat16 weights.

| name       | class                         | updates                                                      |
|------------|-------------------------------|--------------------------------------------------------------|
| adamw_8bit | bitsandbytes.optim.AdamW8bit  | everything; moments in 8 bits, with a scale per 256 elements |
| muon       | our own, see muon.py          | matrices; everything else is updated by our AdamW            |
| muon_heads | the same                      | the same; each head of queries, keys and values by itself    |
| adafactor  | torch.optim.Adafactor         | everything; a row and a column instead of a second moment    |
| sgd        | torch.optim.SGD               | everything; with momentum                                    |

Updates are computed in float32: a bfloat16 weight is widened by the 16 bits that are kept of it ("master",
see docs/optimizer.md), updated and split again, so that steps smaller than bfloat16's spacing are not lost. A
fused parameter (query, key and value; gate and up; all experts) is updated as its separate matrices:
orthogonalising the whole, or taking the mean of its columns, would be another algorithm on a model with
separate projections.

A library's own `step` updates one parameter after another. A DTensor is gathered for it, updated whole by
every rank, and sharded again. Its state is sharded where it has the parameter's shape, and replicated
otherwise. The result is that of one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.expressions import Expr
from liger_models.convert.errors import ConfigError
from liger_models.optim import muon
from liger_models.optim.adamw import AdamW, _gradient
from liger_models.optim.dtensors import from_local, gathered, local, sharded, whole_value

OPTIMIZERS = ("adamw", "adamw_8bit", "muon", "muon_heads", "adafactor", "sgd")
MUON = ("muon", "muon_heads")  # of whole projections, or of each head of queries, keys and values
LIBRARY_WEIGHTS = ("master", "plain")  # of WEIGHTS, for all but our AdamW
SPLIT = ("adafactor",)  # whose state has not the shape of a fused parameter, but of its separate matrices
MIN_8BIT_SIZE = 4096  # elements; bitsandbytes keeps the moments of smaller tensors in float32
QUANTISED_BLOCK = 256

MOST_8BIT_SIZE = 2**31 - 1  # elements: bitsandbytes passes their number to its kernels in 32 bits, unchecked

MOMENTUM = 0.9  # of SGD


def make_library_optimizer(
    name: str, parameters: list[Tensor], *, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """The optimizer of this name with this package's settings; learning rate and weight decay are set later.

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

    Raises:
        ConfigError: a parameter has more elements than the library numbers.

    Other arguments are AdamW's. `clip_grad_norm` is also AdamW's: the next step scales the gradients. With
    torch.amp.GradScaler, that unscales the gradients and skips steps, which synchronises the device.
    """

    _step_supports_amp_scaling = False

    def __init__(
        self, params: list[dict[str, Any]], *args: Any, forms: Mapping[Tensor, Expr], **options: Any
    ) -> None:
        super().__init__([{"library": None, **group} for group in params], *args, **options)
        _check_sizes(self.param_groups)
        self._forms = dict(forms)
        self._libraries: dict[str, torch.optim.Optimizer] = {}
        self._step_sizes: dict[Tensor, float | Tensor] = {}  # of Muon
        for group in self.param_groups:
            if (name := group["library"]) is not None and name not in MUON:
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
        if group["library"] in MUON:
            return state | {"momentum_buffer": whole}
        return state | self._run({**group, "lr": 0.0}, parameter, whole, torch.zeros_like(whole), {})

    def _step_group(self, group: dict[str, Any], places: Iterator[int], *scaling: Any) -> None:
        if group["library"] is None:
            super()._step_group(group, places, *scaling)
            return
        trained = [p for p, _ in zip(group["params"], places) if p.grad is not None]  # noqa: B905 (they go on)
        if group["library"] in MUON:
            for round_ in muon.rounds(trained, self._forms):
                self._step_round(group, round_)
        else:
            for parameter in trained:
                self._update(group, parameter)

    def _step_round(self, group: dict[str, Any], round_: muon.Round) -> None:
        """Take Muon's step on the parameters of a round."""
        updates = {}
        for parameter in [p for p in round_.parameters if p is not None]:
            updates[parameter] = self._momentum(group, parameter)
        for parameter, direction in muon.directions(round_, updates, self._forms):
            if parameter not in self._step_sizes:
                self._step_sizes[parameter] = muon.own_step_sizes(parameter, self._forms.get(parameter))
            size, lr = self._step_sizes[parameter], group["lr"]
            wide, residue = self._wide(parameter)
            wide.mul_(1 - lr * group["weight_decay"])
            if isinstance(size, float):
                wide.add_(direction, alpha=-lr * size)
            else:
                wide.addcmul_(direction.to(wide.dtype), size.to(wide.dtype), value=-lr)
            _write(wide, local(parameter.detach()), residue)

    def _momentum(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """Add the gradient to the momentum. Returns Nesterov's momentum, this rank's part, in bfloat16."""
        gradient, state = self._scaled_gradient(parameter), self.state[parameter]
        if not state:
            self._start(group, parameter)
            state["momentum_buffer"] = from_local(torch.zeros_like(gradient), parameter)
        momentum = local(state["momentum_buffer"]).lerp_(gradient, 1 - muon.MOMENTUM)
        return gradient.lerp(momentum, muon.MOMENTUM).bfloat16()

    def _update(self, group: dict[str, Any], parameter: Tensor) -> None:
        """Take the library's step on a parameter, which is gathered for it if it is sharded."""
        state = self.state[parameter]
        if not state:
            self._start(group, parameter)
        wide, residue = self._wide(parameter)
        gradient = self._scaled_gradient(parameter)
        whole = gathered(wide, parameter)
        kept = {key: whole_value(value) for key, value in state.items() if key != "residue"}
        kept = self._run(group, parameter, whole, gathered(gradient, parameter), kept)
        state |= {key: sharded(value, parameter) for key, value in kept.items()}
        _write(local(sharded(whole, parameter)), local(parameter.detach()), residue)

    def _start(self, group: dict[str, Any], parameter: Tensor) -> None:
        if _keeps_residue(group, parameter):
            self.state[parameter]["residue"] = torch.zeros_like(parameter, dtype=torch.int16)

    def _scaled_gradient(self, parameter: Tensor) -> Tensor:
        """This rank's gradient, clipped, in float32 for bfloat16 weights."""
        gradient = _gradient(parameter)
        gradient = gradient.float() if parameter.dtype == torch.bfloat16 else gradient.to(parameter.dtype)
        factor = self._factors.get(gradient.device)
        return gradient if factor is None else gradient * factor

    def _wide(self, parameter: Tensor) -> tuple[Tensor, Tensor | None]:
        """This rank's weights, in float32 if they are in bfloat16, and their residue."""
        state, own = self.state[parameter], local(parameter.detach())
        residue = local(state["residue"]) if "residue" in state else None
        return (_widened(own, residue) if own.dtype == torch.bfloat16 else own), residue

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
    """Temporary bytes of a step, given the number of elements of the largest parameter: in float32 its
    gradient, its value if that is in bfloat16, and the library's intermediate results.
    """
    results = {"adamw_8bit": 0, "muon": 6, "muon_heads": 6, "adafactor": 8, "sgd": 4}[name]
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


def _check_sizes(groups: Sequence[Mapping[str, Any]]) -> None:
    sizes = [p for group in groups if group["library"] == "adamw_8bit" for p in group["params"]]
    if too_large := [tuple(p.shape) for p in sizes if p.numel() > MOST_8BIT_SIZE]:
        raise ConfigError(
            f"parameters of the shapes {too_large} have more than {MOST_8BIT_SIZE} elements, all that "
            "bitsandbytes' kernels can number: use optimizer adamw, or freeze them"
        )


# ---------------------------------------------------------------------------------------- bfloat16 and shards


def _keeps_residue(group: dict[str, Any], parameter: Tensor) -> bool:
    return parameter.dtype == torch.bfloat16 and group["weights"] == "master"


def _widened(own: Tensor, residue: Tensor | None) -> Tensor:
    """The float32 weight whose upper half is `own` and whose lower half is `residue`."""
    wide = own.float()
    if residue is not None:
        wide.view(torch.int32).add_(residue)
    return wide


def _write(wide: Tensor, own: Tensor, residue: Tensor | None) -> None:
    """Store updated weights in a rank's part of the parameter."""
    if own.dtype == torch.bfloat16:
        _narrow(wide, own, residue)
    elif wide is not own:
        own.copy_(wide)


def _narrow(wide: Tensor, own: Tensor, residue: Tensor | None) -> None:
    """Inverse of `_widened`, into `own` and `residue`; `wide` is overwritten. Ties round away from zero, as
    in AdamW's kernel: the residue is then the lower half, with a sign.
    """
    if residue is None:
        own.copy_(wide)
        return
    nan = wide.isnan()
    bits = wide.contiguous().view(torch.int32)
    residue.copy_(bits)
    residue.masked_fill_(nan, 0)
    own.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))
    own.masked_fill_(nan, torch.nan)  # a carry would turn some NaNs into zeros
