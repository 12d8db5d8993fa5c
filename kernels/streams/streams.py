"""Several residual streams X_i of a token: their weights, weighted sum, and mixtures (manifold-constrained
hyper-connections: Xie et al., 2025, arXiv:2512.24880).

    y = W [X_1 .. X_n],   z = y / rms([X_1 .. X_n])
    pre | post | mix = split(scale * z + base)                                      n | n | n x n
    h = sum_i (sigmoid(pre_i) + eps) X_i,   X'_j = 2 sigmoid(post_j) f + sum_i M_ij X_i

M is softmax(mix) + eps over its rows, whose columns, then rows and columns in turn, are divided by their sums
plus eps (Sinkhorn and Knopp, 1967). Everything is in float32, and results are rounded once.

Streams may also stay apart (Hunyuan 4): there is no `mix`, M is the identity, and the weight of the branch's
output is magnitude sigmoid(post_j) + eps. Mixtures by weights from elsewhere (AltUp) may add a second tensor
to all streams but the first.

Traffic of a token with streams of b bytes in all: 2 b and the sum forward, 5 b and the sum's gradient
backward, as y and its gradients are products of torch's; of the mixtures 2 b and 4 b, and the branch's (of
streams that stay apart 2 b and b). Saved are streams and branch (without mixtures only the branch), y and
1 / rms; the iterations are made again in the backward pass. With W in float32
and streams in bfloat16, W is the sum of three matrices in bfloat16, so that products are exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_once_differentiable,
    at_least_float32,
    next_power_of_2,
    on_device_of,
    once_differentiable,
    use_triton,
    without_autocast,
)
from liger_models.kernels.streams._stream_kernels import (
    mixed_backward_kernel,
    mixed_forward_kernel,
    weighted_backward_kernel,
    weighted_forward_kernel,
)


def weighted_streams(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    count: int,
    eps: float,
    norm_eps: float,
    iterations: int = 1,
    magnitude: float = 2.0,
) -> tuple[Tensor, ...]:
    """Sum streams by weights that depend on them.

    Args:
        streams: [T, n H], any floating dtype.
        fn: [n (n + 2), n H]; [2 n, n H] for streams that stay apart; or [n, n H] for the sum alone. base: as
            many numbers as fn has rows; scale: [3], [2] or [1].
        count: the number of streams n.
        eps: of weights and sums; norm_eps: of the mean square.
        iterations: of the mixture's normalisation.
        magnitude: the factor of the sigmoid in the weights of the branch's output.

    Returns:
        The sum [T, H] in the streams' dtype; except for the sum alone also the weights of the branch's output
        [T, n], and if streams are mixed M [T, n, n], in at least float32.

    Raises:
        ValueError: shapes that do not fit.
    """
    rows = sum(_sizes(scale, count))
    if fn.shape != (rows, streams.shape[1]) or len(base) != rows or streams.shape[1] % count:
        raise ValueError(
            f"found streams {tuple(streams.shape)}, fn {tuple(fn.shape)} and base {tuple(base.shape)}; "
            f"expected [T, {count} H], [{rows}, {count} H] and [{rows}]"
        )
    options = count, eps, norm_eps, iterations, magnitude
    if use_triton(streams, fn, base, scale):
        with without_autocast(streams):
            found = _Weighted.apply(streams.contiguous(), fn, base, scale, *options)
        return tuple(found) if len(scale) > 1 else (found,)
    return weighted_streams_plain(streams, fn, base, scale, *options)


def weighted_streams_plain(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    count: int,
    eps: float,
    norm_eps: float,
    iterations: int,
    magnitude: float,
) -> tuple[Tensor, ...]:
    """Plain twin of `weighted_streams`."""
    wide, base, scale = (at_least_float32(x) for x in (streams, base, scale))
    with without_autocast(wide):
        z = wide @ at_least_float32(fn).mT
    z = z * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps)
    pre, *rest = (z * _factors(scale, count) + base).split(_sizes(scale, count), dim=-1)
    parts = streams.unflatten(-1, (count, -1))
    summed = (parts * (pre.sigmoid() + eps)[..., None]).sum(1).to(streams.dtype)
    if not rest:
        return (summed,)
    weights = magnitude * rest[0].sigmoid()
    if len(rest) == 1:
        return summed, weights + eps
    mixture = rest[1].unflatten(-1, (count, count)).softmax(-1) + eps
    mixture = mixture / (mixture.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mixture = mixture / (mixture.sum(-1, keepdim=True) + eps)
        mixture = mixture / (mixture.sum(-2, keepdim=True) + eps)
    return summed, weights, mixture


def mixed_streams(
    streams: Tensor,
    branch: Tensor,
    post: Tensor,
    mixture: Tensor | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """Add a branch's output to mixtures of streams, or to the streams themselves.

    Args:
        streams: [T, n H]; branch: [T, H].
        post: [T, n]; mixture: [T, n, n] or None, as `weighted_streams` returns them.
        also: [T, H], added to all streams but the first; or None.

    Returns:
        [T, n H] in the streams' dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    tokens, count = post.shape
    fits = branch.shape[0] == tokens and streams.shape == (tokens, count * branch.shape[1])
    fits = fits and (also is None or also.shape == branch.shape)
    if not fits or (mixture is not None and mixture.shape != (tokens, count, count)):
        of_mixture, of_also = (None if x is None else tuple(x.shape) for x in (mixture, also))
        raise ValueError(
            f"found streams {tuple(streams.shape)}, branch {tuple(branch.shape)}, post {tuple(post.shape)}, "
            f"mixture {of_mixture} and also {of_also}; expected [T, n H], [T, H], [T, n], [T, n, n] or None, "
            "and [T, H] or None"
        )
    return _mixed(streams, branch, post, mixture, also)


def summed_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """Sum streams by given weights.

    Args:
        streams: [T, n H]; weights: [T, n].

    Returns:
        [T, H] in the streams' dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    tokens, count = weights.shape
    if streams.shape[0] != tokens or streams.shape[1] % count:
        raise ValueError(
            f"found streams {tuple(streams.shape)} and weights {tuple(weights.shape)}; expected [T, n H] and "
            "[T, n]"
        )
    return _mixed(streams, None, None, weights[..., None], None)


def _mixed(
    streams: Tensor, branch: Tensor | None, post: Tensor | None, mixture: Tensor | None, also: Tensor | None
) -> Tensor:
    if use_triton(streams, branch, post, mixture, also):
        dtype = streams.dtype
        branch, also = (None if x is None else x.to(dtype) for x in (branch, also))
        operands = streams, branch, post, mixture, also
        out: Tensor = _Mixed.apply(*(None if x is None else x.contiguous() for x in operands))
        return out
    with without_autocast(streams):  # whose products would round the mixtures of wider streams
        result: Tensor = as_once_differentiable(mixed_streams_plain(streams, branch, post, mixture, also))
    return result


def mixed_streams_plain(
    streams: Tensor,
    branch: Tensor | None,
    post: Tensor | None,
    mixture: Tensor | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """Plain twin of `mixed_streams` and, without a branch, of `summed_streams`."""
    dtype = streams.dtype
    if mixture is not None:
        mixed = torch.bmm(mixture.to(dtype).mT, streams.unflatten(-1, (mixture.shape[1], -1)))
        if branch is not None and post is not None:
            mixed = post.to(dtype)[..., None] * branch.to(dtype)[:, None] + mixed
    else:
        assert branch is not None
        assert post is not None
        added = post[..., None] * branch.to(post.dtype)[:, None]
        mixed = (streams.to(post.dtype).unflatten(-1, added.shape[1:]) + added).to(dtype)
    if also is not None:
        first, others = mixed[:, :1], mixed[:, 1:]
        mixed = torch.cat([first, others + also.to(dtype)[:, None].expand_as(others)], 1)
    return mixed.flatten(1)


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        count: int,
        eps: float,
        norm_eps: float,
        iterations: int,
        magnitude: float,
    ) -> Any:
        tokens, parts = len(streams), len(scale)
        y = _product(streams, fn.mT)
        base, scale = base.float().contiguous(), scale.float().contiguous()
        summed = streams.new_empty(tokens, streams.shape[1] // count)
        rstd = torch.empty(tokens, dtype=torch.float32, device=streams.device)
        shapes = ((tokens, count), (tokens, count, count))[: parts - 1]
        others = [torch.empty(shape, dtype=torch.float32, device=streams.device) for shape in shapes]
        if tokens:
            with on_device_of(streams):
                weighted_forward_kernel[(tokens,)](
                    *(streams, y, base, scale, rstd, summed, *_padded(others)),
                    *(summed.shape[1], iterations, eps, norm_eps, magnitude),
                    PARTS=parts,
                    **_constants(count, summed.shape[1]),
                )
        ctx.save_for_backward(streams, fn, base, scale, y, rstd)
        ctx.options = count, iterations, eps, magnitude
        return (summed, *others) if others else summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsummed: Tensor, *dothers: Tensor) -> Any:
        streams, fn, base, scale, y, rstd = ctx.saved_tensors
        count, iterations, eps, magnitude = ctx.options
        tokens, width = dsummed.shape
        dstreams, dlogits = torch.empty_like(streams), torch.empty_like(y)
        if tokens:
            with on_device_of(streams):
                weighted_backward_kernel[(tokens,)](
                    *(streams, y, base, scale, rstd, dsummed.contiguous()),
                    *_padded([x.contiguous() for x in dothers]),
                    *(dstreams, dlogits, width, iterations, eps, magnitude),
                    PARTS=len(scale),
                    **_constants(count, width),
                )
        of_scale = (dlogits * y * rstd[:, None]).sum(0).split(_sizes(scale, count))
        dscale = torch.stack([part.sum() for part in of_scale])
        dy = dlogits * _factors(scale, count) * rstd[:, None]
        dfn = _product(streams.mT, dy).mT.to(fn.dtype) if ctx.needs_input_grad[1] else None
        _add_product(dstreams, dy, fn)
        return dstreams, dfn, dlogits.sum(0), dscale, *(None,) * 5


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        branch: Tensor | None,
        post: Tensor | None,
        mixture: Tensor | None,
        also: Tensor | None,
    ) -> Tensor:
        tokens, width, constants = ctx.sizes = _sizes_of_mixture(streams, post, mixture)
        out = streams.new_empty(tokens, constants["M"] * width)
        if tokens:
            with on_device_of(streams):
                mixed_forward_kernel[(tokens,)](streams, branch, post, mixture, also, out, width, **constants)
        # Of streams that stay apart no gradient needs them.
        ctx.save_for_backward(None if mixture is None else streams, branch, post, mixture)
        ctx.also = also is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        saved, (tokens, width, constants) = ctx.saved_tensors, ctx.sizes
        found = [None if x is None else torch.empty_like(x) for x in saved]
        found.append(dout.new_empty(tokens, width) if ctx.also else None)
        dout = dout.contiguous()
        if tokens:
            with on_device_of(dout):
                mixed_backward_kernel[(tokens,)](*saved, dout, *found, width, **constants)
        return dout if found[0] is None else found[0], *found[1:]


def _sizes_of_mixture(
    streams: Tensor, post: Tensor | None, mixture: Tensor | None
) -> tuple[int, int, dict[str, int]]:
    """Number of tokens, width of a stream, and constants of the kernels of mixtures."""
    first: Any = post if mixture is None else mixture
    count, sums = first.shape[1], first.shape[-1]
    width = streams.shape[1] // count
    constants = _constants(count, width) | {"M": sums, "MS": next_power_of_2(sums)}
    del constants["NS"]
    return len(streams), width, constants | {"MIXED": mixture is not None}


def _padded(others: list[Tensor]) -> list[Tensor | None]:
    """The weights of the branch's output and the mixture, as far as there are any."""
    return [*others, None, None][:2]


def _sizes(scale: Tensor, count: int) -> list[int]:
    return [count, count, count * count][: len(scale)]


def _factors(scale: Tensor, count: int) -> Tensor:
    """The factor of each logit."""
    return torch.cat([one.expand(n) for one, n in zip(scale, _sizes(scale, count), strict=True)])


def _constants(count: int, width: int) -> dict[str, int]:
    block = min(1024, max(16, next_power_of_2(width)))
    return {"N": count, "NS": next_power_of_2(count), "BLOCK": block, "num_warps": 4}


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32; b may be wider than a."""
    if not a.is_cpu and a.dtype == torch.bfloat16:
        parts = [b] if b.dtype == torch.bfloat16 else _in_bfloat16(b, 3)
        found = torch.mm(a, torch.cat(parts, 1), out_dtype=torch.float32)
        return found.unflatten(1, (len(parts), -1)).sum(1)
    return a.float() @ b.float()


def _add_product(x: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b, of a in float32, to x. If x is in bfloat16, the product has 16 bits or more."""
    if x.is_cpu or x.dtype != torch.bfloat16:
        x.add_(a @ b.float())
        return
    high, low = _in_bfloat16(a, 2)
    own = _in_bfloat16(b, 2) if b.dtype != torch.bfloat16 else [b]
    left, right = ([high, low, high], [own[0], own[0], own[1]]) if len(own) == 2 else ([high, low], own * 2)
    x.addmm_(torch.cat(left, 1), torch.cat(right, 0))


def _in_bfloat16(x: Tensor, count: int) -> list[Tensor]:
    """So many tensors whose sum is x, or near it: each rounds what the ones before left."""
    parts: list[Tensor] = []
    rest = x.float()
    for _ in range(count):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return parts
