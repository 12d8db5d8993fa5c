"""Muon (Jordan et al., 2024): steps along orthogonalised momentum, for fused, stacked and sharded matrices.

For each matrix W with gradient G, as torch.optim.Muon with adjust_lr_fn="match_rms_adamw":

    B = momentum B + (1 - momentum) G                  # float32, in the parameter's shape
    D = Newton-Schulz of momentum B + (1 - momentum) G # bfloat16: the nearest matrix with orthonormal rows
    W = (1 - lr weight_decay) W - lr 0.2 sqrt(max(rows, columns)) D

The factor gives updates the size of AdamW's, so that both have one learning rate and one weight decay (Liu et
al., 2025, arXiv:2502.16982, section 2.2). The matrices of a fused parameter (query, key and value; gate and
up; all experts) are orthogonalised separately; those of one shape are one batched product.

Momentum and weights are updated on shards. To orthogonalise, parameters sharded by rows go to one rank each,
in bfloat16: in a round every rank of a process group receives the rows of one parameter, and sends the result
back. Ranks have about equal work. Stacks of experts whose ranks hold whole experts are not sent. Other
shardings (several mesh dimensions, other dimensions) are gathered by every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.expressions import Cat, Expr, Ref, Stack
from liger_models.optim.dtensors import gathered, is_dtensor, local, sharded

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al.: the steepest slope at zero that stays bounded
EPS = 1e-7


@torch.no_grad()
def newton_schulz(matrices: Tensor) -> Tensor:
    """Approximate U V^T of each matrix's singular value decomposition U S V^T.

    Args:
        matrices: [..., rows, columns], any dtype.

    Returns:
        Matrices of the same shape in bfloat16, with singular values between about 0.7 and 1.2.
    """
    if min(matrices.shape[-2:]) == 0 or matrices.numel() == 0:
        return matrices.bfloat16()
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16()
    x = (x.mT if tall else x).reshape(-1, min(x.shape[-2:]), max(x.shape[-2:]))
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    x = x.view(*matrices.shape[:-2], *x.shape[-2:])
    return x.mT if tall else x


def orthogonalised(update: Tensor, form: Expr | None) -> Tensor:
    """The orthogonalised update of a whole parameter, in bfloat16, matrix by matrix.

    Args:
        update: momentum in the parameter's shape; without `form`, a stack of matrices or one.
        form: of a fused parameter, the expression by which it is split into matrices.
    """
    if form is None:
        return newton_schulz(update)
    matrices = form.write(update)
    by_shape: dict[torch.Size, list[str]] = {}
    for name, matrix in matrices.items():
        by_shape.setdefault(matrix.shape, []).append(name)
    found: dict[str, Tensor] = {}
    for names in by_shape.values():
        batch = newton_schulz(torch.stack([matrices[name] for name in names]))
        found.update(zip(names, batch, strict=True))
    return form.read(found.__getitem__)


def step_sizes(shape: Sequence[int], form: Expr | None) -> float | Tensor:
    """The factor 0.2 sqrt(max(rows, columns)) of a parameter's matrices: one number if all are alike, else a
    float32 tensor on the CPU that broadcasts to the parameter's shape.
    """
    if form is None:
        return _step_size(shape)
    sizes = {_step_size(ref.shape) for ref in form.refs()}
    if len(sizes) == 1:
        return sizes.pop()
    if isinstance(form, Stack) and len({tuple(ref.shape for ref in part.refs()) for part in form.parts}) == 1:
        return torch.as_tensor(step_sizes(form.parts[0].shape, form.parts[0]))[None]
    if isinstance(form, Cat) and form.dim == 0 and all(isinstance(part, Ref) for part in form.parts):
        return torch.cat([torch.full((part.shape[0], 1), _step_size(part.shape)) for part in form.parts])
    shapes = {ref.name: ref.shape for ref in form.refs()}
    return form.read(lambda name: torch.full(shapes[name], _step_size(shapes[name])))


def own_step_sizes(parameter: Tensor, form: Expr | None) -> float | Tensor:
    """`step_sizes` of this rank's part of a parameter, on its device."""
    sizes = step_sizes(parameter.shape, form)
    if isinstance(sizes, float):
        return sizes
    if is_dtensor(parameter):
        if (span := _row_span(parameter)) is None:
            whole = sizes.to(local(parameter).device).expand(parameter.shape).contiguous()
            sizes = local(sharded(whole, parameter))
        elif len(sizes) > 1:
            sizes = sizes[slice(*span)]
    return sizes.to(local(parameter).device)


def _step_size(shape: Sequence[int]) -> float:
    return 0.2 * math.sqrt(max(shape[-2:]))


# -------------------------------------------------------------------------------------------------- in rounds


@dataclass(frozen=True)
class Round:
    """Parameters that are orthogonalised together.

    With a process group the n-th rank orthogonalises `parameters[n]`, sharded by rows over the group; None
    where a rank has nothing to do. Without, every rank orthogonalises the matrices that it holds, or gathers.
    """

    parameters: tuple[Tensor | None, ...]
    group: Any = None


def rounds(parameters: Sequence[Tensor], forms: Mapping[Tensor, Expr]) -> Iterator[Round]:
    """Divide parameters among ranks, the same way on every rank."""
    by_group: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        group = None if _local_form(parameter, forms.get(parameter)) else _row_group(parameter)
        if group is None:
            yield Round((parameter,))
        else:
            by_group.setdefault(group, []).append(parameter)
    for group, members in by_group.items():
        owned: list[list[Tensor]] = [[] for _ in range(group.size())]
        work = [0.0] * group.size()
        for parameter in sorted(members, key=_work, reverse=True):  # stable: the same order on every rank
            rank = work.index(min(work))
            owned[rank].append(parameter)
            work[rank] += _work(parameter)
        for n in range(max(map(len, owned))):
            yield Round(tuple(of[n] if n < len(of) else None for of in owned), group)


def directions(
    round_: Round, updates: Mapping[Tensor, Tensor], forms: Mapping[Tensor, Expr]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter of a round with its orthogonalised update, this rank's part, in bfloat16.

    Args:
        updates: this rank's part of each parameter's update, any dtype.

    All ranks of the round's group must call this.
    """
    if round_.group is None:
        (parameter,) = round_.parameters
        assert parameter is not None
        update = updates[parameter].bfloat16()
        held = _local_form(parameter, forms.get(parameter))
        if held:
            yield parameter, orthogonalised(update, held.form)
        else:
            whole = orthogonalised(gathered(update, parameter), forms.get(parameter))
            yield parameter, local(sharded(whole, parameter))
        return
    ranks, own = round_.group.size(), round_.group.rank()
    mine = round_.parameters[own]
    sent = [None if p is None else updates[p].bfloat16().contiguous() for p in round_.parameters]
    pieces = [_rows(mine, rank, ranks) for rank in range(ranks)]
    received = _exchange(sent, [0 if mine is None else count * _row_size(mine) for count in pieces], round_)
    del sent
    returned: list[Tensor | None] = [None] * ranks
    if mine is not None:
        whole = orthogonalised(received.view(mine.shape), forms.get(mine))
        returned = list(whole.split(pieces))
    counts = [0 if p is None else _rows(p, own, ranks) * _row_size(p) for p in round_.parameters]
    results = _exchange(returned, counts, round_).split(counts)
    for parameter, result in zip(round_.parameters, results, strict=True):
        if parameter is not None:
            yield parameter, result.view(updates[parameter].shape)


def _exchange(parts: Sequence[Tensor | None], counts: list[int], round_: Round) -> Tensor:
    """Send the n-th part to the n-th rank, and receive `counts[n]` elements from it."""
    flat = [part.reshape(-1) for part in parts if part is not None]
    device = next(local(p).device for p in round_.parameters if p is not None)
    sizes = [0 if part is None else part.numel() for part in parts]
    sent = torch.cat(flat) if flat else torch.empty(0, dtype=torch.bfloat16, device=device)
    received = torch.empty(sum(counts), dtype=torch.bfloat16, device=device)
    torch.distributed.all_to_all_single(received, sent, counts, sizes, group=round_.group)
    return received


@dataclass(frozen=True)
class _Held:
    """A rank holds whole matrices of a parameter; `form` splits them."""

    form: Expr | None


def _local_form(parameter: Tensor, form: Expr | None) -> _Held | None:
    """How this rank's part of a parameter is split; None if the part may hold parts of matrices.

    The answer is the same on every rank.
    """
    if not is_dtensor(parameter) or all(place.is_replicate() for place in parameter.placements):  # type: ignore[attr-defined]
        return _Held(form)
    if parameter.ndim < 3 or not (form is None or isinstance(form, Stack)):
        return None
    span = _row_span(parameter)
    if span is None:
        return None
    start, stop = span
    if form is None or start == stop:
        return _Held(None)
    assert isinstance(form, Stack)
    return _Held(Stack(form.parts[start:stop]))


def _row_group(parameter: Any) -> Any:
    """The process group over which a parameter is sharded by rows; None if it is sharded another way."""
    if _row_span(parameter) is None:
        return None
    mesh = parameter.device_mesh
    (dim,) = (n for n, place in enumerate(parameter.placements) if not place.is_replicate())
    return mesh.get_group(dim)


def _row_span(parameter: Any) -> tuple[int, int] | None:
    """This rank's rows of a parameter that one mesh dimension shards along dimension 0; None for others."""
    from torch.distributed.tensor import Shard

    divided = [(n, place) for n, place in enumerate(parameter.placements) if not place.is_replicate()]
    if len(divided) != 1 or type(divided[0][1]) is not Shard or divided[0][1].dim != 0:
        return None
    group = parameter.device_mesh.get_group(divided[0][0])
    start = min(parameter.shape[0], group.rank() * -(-parameter.shape[0] // group.size()))
    return start, start + _rows(parameter, group.rank(), group.size())


def _rows(parameter: Tensor | None, rank: int, ranks: int) -> int:
    """Rows on a rank, as torch.chunk divides them."""
    if parameter is None:
        return 0
    share = -(-parameter.shape[0] // ranks)
    return min(share, max(0, parameter.shape[0] - rank * share))


def _row_size(parameter: Tensor) -> int:
    return parameter.shape[1:].numel()


def _work(parameter: Tensor) -> float:
    """Number of multiplications, up to a factor, as if the parameter were one matrix."""
    rows, columns = parameter.shape[-2:]
    return float(parameter.numel()) * min(rows, columns)
