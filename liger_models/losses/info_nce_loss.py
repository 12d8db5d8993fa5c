"""InfoNCE (van den Oord et al., 2018, arXiv:1807.03748, eq. 4) with in-batch negatives, for embedding models.

    loss = mean_i  - log ( exp(cos(q_i, p_i) / t) / sum_j exp(cos(q_i, p_j) / t) )

j runs over the positives of all queries and over hard negatives, on all ranks if they are gathered. It is the
cross entropy of a linear layer whose weight holds the passages, so that `linear_cross_entropy` computes it in
chunks of queries, with its gradients, and the matrix of similarities never exists.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels import linear_cross_entropy


def info_nce_loss(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor | None = None,
    *,
    temperature: float = 0.05,
    group: Any = None,
    num_items: Tensor | int | float | None = None,
) -> Tensor:
    """Mean loss of N queries, or its sum divided by `num_items`: a float32 scalar (float64 for float64).

    Similarities are cosines in float32, also under autocast: a temperature of 0.05 multiplies their rounding
    by 20.

    Args:
        queries: [N, H] embeddings of any floating point dtype; they are normalised here.
        positives: [N, H], the passage of each query; the others' are its negatives.
        negatives: [..., H], further negatives of all queries, such as [N, K, H] hard ones.
        temperature: divides the cosines.
        group: process group (`dist.group.WORLD`) from whose ranks passages are gathered, with gradients; N
            and the number of negatives may differ between ranks. The mean is over this rank's queries, and
            data parallelism averages over ranks.
        num_items: divisor instead of N.

    Raises:
        ValueError: incompatible shapes, no queries, or a temperature that is not positive.
    """
    width = queries.shape[-1:]
    shapes = [list(x.shape) for x in (queries, positives, negatives) if x is not None]
    fit = queries.dim() == 2 and positives.shape == queries.shape
    if not fit or not len(queries) or (negatives is not None and negatives.shape[-1:] != width):
        raise ValueError(
            f"found embeddings of shape {', '.join(map(str, shapes))}; expected queries and positives [N, H] "
            "with N of 1 or more, and negatives [..., H]"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; expected a positive number")
    passages = positives if negatives is None else torch.cat([positives, negatives.reshape(-1, *width)])
    with torch.autocast(queries.device.type, enabled=False):
        accumulate = torch.promote_types(torch.promote_types(queries.dtype, passages.dtype), torch.float32)
        queries, passages = (F.normalize(x.to(accumulate), dim=-1) for x in (queries, passages))
        first = 0
        if group is not None:
            passages, first = _gathered(passages, group)
        own = torch.arange(first, first + len(queries), device=queries.device)
        options: dict[str, Any] = {"temperature": temperature, "num_valid": len(queries)}
        loss = linear_cross_entropy(queries, passages, own, reduction="sum", **options)
    assert isinstance(loss, Tensor)
    return loss / (len(queries) if num_items is None else num_items)


def _gathered(passages: Tensor, group: Any) -> tuple[Tensor, int]:
    """The rows of all ranks, in their order, and the index of this rank's first."""
    count = torch.tensor([len(passages)], device=passages.device)
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, count, group=group)
    sizes = torch.cat(counts).tolist()
    return _Gather.apply(passages, sizes, group), sum(sizes[: dist.get_rank(group)])


class _Gather(torch.autograd.Function):
    """Rows of all ranks; their gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        padded = F.pad(rows, (0, 0, 0, max(sizes) - len(rows)))
        of_ranks = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(of_ranks, padded, group=group)
        return torch.cat([rows[:size] for rows, size in zip(of_ranks, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()  # which the caller may still read
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.split(ctx.sizes)[dist.get_rank(ctx.group)], None, None
