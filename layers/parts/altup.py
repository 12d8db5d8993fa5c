"""Alternating updates of several residual streams (AltUp: Baykal et al., 2023, arXiv:2301.13310), and the
low-rank branch of LAuReL (Menghani et al., 2024, arXiv:2411.07501), as in Gemma 3n.

A token has n streams X_j of H elements. A layer predicts all from all, computes the active one, a, and
corrects all by what it computed:

    m(u) = tanh(R norm(u) / H)                                       n, the norm's and R's weights for both m
    P_j = X_j + sum_k (C m(X_a))_jk X_k,     y = layer(P_a)
    X'_j = P_j + (1 + (D m(y))_j) (y - P_a)

The other predictions are never computed: X'_j is one mixture of the X_k. A model begins with streams that are
projections of the embedding, as large as it, and ends with the mean of projections of the streams, as large
as the first. A stream's size is its root mean square.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.convert.checkpoints.shards import is_sharded, is_zero3, local_tensor
from liger_models.convert.errors import ConfigError
from liger_models.kernels._dispatch import at_least_float32
from liger_models.kernels.streams.streams import mixed_streams, summed_streams
from liger_models.layers.parts.hyper_connection import StreamsHead
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipe, recompute
from liger_models.layers.specs import AltUpSpec, GatedStreamsSpec, LayerNormSpec, NormSpec, StreamsSpec


class AltUp(nn.Module):
    """A layer's predictions and corrections of streams.

    Args:
        hidden_size: the width H of a stream.
        spec: their number, the active one, and the limit of coefficients.
        norm: of the router's input.
    """

    def __init__(self, hidden_size: int, spec: AltUpSpec, norm: NormSpec | LayerNormSpec):
        super().__init__()
        self.hidden_size, self.spec, n = hidden_size, spec, spec.count
        self.correct_output_scale = nn.Parameter(torch.empty(hidden_size)) if spec.scaled else None
        self.correction_coefs = Coefficients(n, n, spec.limit)
        self.prediction_coefs = Coefficients(n, n * n, spec.limit, stored=True)
        self.modality_router = Linear(hidden_size, n, bias=False)
        self.router_norm = make_norm(hidden_size, norm)
        self.reset_parameters()

    def reset_parameters(self, *_: Any) -> None:
        """Set the scale to zeros."""
        if self.correct_output_scale is not None:
            nn.init.zeros_(self.correct_output_scale)

    def predict(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """streams [T, n H] -> the active prediction [T, H], and the mixture of all [T, n, n] for `add`."""
        n, active = self.spec.count, self.spec.active
        found = self.prediction_coefs(self._modalities(streams.unflatten(-1, (n, -1))[:, active]))
        own = torch.eye(n, device=found.device, dtype=at_least_float32(found).dtype)
        mixture = (found.unflatten(-1, (n, n)).mT + own).contiguous()  # from stream, to stream
        return summed_streams(streams, mixture[..., active]), mixture

    def correct(self, predicted: Tensor, activated: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The active prediction and what the layer made of it, [T, H] each -> their difference, the share of
        it for each stream, [T, n], and the active stream after its correction, scaled.
        """
        shares = self.correction_coefs(self._modalities(activated)) + 1.0
        change = carry_recipe(activated - predicted, torch.sub, activated, predicted)
        own = shares[:, self.spec.active, None]
        corrected = torch.addcmul(predicted, change, own)
        carry_recipe(corrected, _corrected, predicted, activated, own)
        if self.correct_output_scale is None:
            return change, shares, corrected
        inputs = predicted, activated, own, self.correct_output_scale
        scaled = (corrected * self.correct_output_scale).to(corrected.dtype)
        return change, shares, carry_recipe(scaled, _scaled, *inputs)

    def add(self, streams: Tensor, change: Tensor, shares: Tensor, mixture: Tensor, also: Tensor) -> Tensor:
        """The corrected streams, [T, n H], all but the first with `also` [T, H]."""
        return mixed_streams(streams, change, shares, mixture, also)

    def _modalities(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, n]."""
        routed = at_least_float32(self.modality_router(self.router_norm(x)))
        return torch.tanh(routed / self.hidden_size).to(x.dtype)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes per token: the streams, the input of the second router, and small ones: of the routers the
        norm's statistic, tanh and the modalities, the shares, the mixture, and its weights of the active
        stream.
        """
        n, wide = self.spec.count, max(4, itemsize)
        small = 2 * (4 + n * (wide + itemsize * (wide > itemsize))) + itemsize * n + wide * n * (n + 1)
        return itemsize * (n + 1) * self.hidden_size + small

    def extra_repr(self) -> str:
        return f"streams={self.spec.count}, active={self.spec.active}, limit={self.spec.limit}"


def _corrected(predicted: Tensor, activated: Tensor, share: Tensor) -> Tensor:
    return torch.addcmul(predicted, activated - predicted, share)


def _scaled(predicted: Tensor, activated: Tensor, share: Tensor, scale: Tensor) -> Tensor:
    return (_corrected(predicted, activated, share) * scale).to(predicted.dtype)


class Coefficients(Linear):
    """A linear layer whose weight is clamped to -limit .. limit in training, as in the reference.

    Args:
        in_features, out_features: the widths of input and output.
        stored: clamp the parameter itself if it is trained, so that it has a gradient beyond the limit, too.
    """

    def __init__(self, in_features: int, out_features: int, limit: float, stored: bool = False):
        super().__init__(in_features, out_features, bias=False)
        self.limit, self.stored = limit, stored
        self.passes_adapters = not stored

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]. A stored weight is clamped before: `clamp_stored`.

        Raises:
            ConfigError: ZeRO-3 shards a stored weight that is beyond the limit.
        """
        if not self.training:
            return super().forward(x)
        if self.stored and self.weight.requires_grad:
            if is_zero3(self.weight):
                self._check_gathered()
            return super().forward(x)
        return F.linear(x, self.weight.clamp(-self.limit, self.limit))

    def clamp_stored(self) -> None:
        """Clamp a stored weight before a call of the model in training: by FSDP2 each process its shard,
        since what it gathers is a copy.

        Raises:
            ConfigError: FSDP2 has gathered the weight with the whole model, and it is beyond the limit.
        """
        if not (self.training and self.stored and self.weight.requires_grad) or is_zero3(self.weight):
            return
        if getattr(self, "_is_fsdp_managed_module", False) and not is_sharded(self.weight):
            self._check_gathered()
        else:
            local_tensor(self.weight.data).clamp_(-self.limit, self.limit)

    def _check_gathered(self) -> None:
        largest = self.weight.detach().abs().max().item()
        if largest > self.limit:
            raise ConfigError(
                f"a weight of prediction_coefs has the magnitude {largest:g}, and is clamped to "
                f"{self.limit:g} in training, which would change only the gathered copy of a sharded weight; "
                "shard each layer before the model with FSDP2's fully_shard, train without sharding, or "
                "freeze prediction_coefs"
            )


def clamp_stored(layers: nn.Module) -> None:
    """Clamp the stored coefficients of all layers before a call of the model in training: `Coefficients`."""
    for module in layers.modules():
        if isinstance(module, Coefficients):
            module.clamp_stored()


class AltUpEnds(nn.Module):
    """The streams of a model: made of the embedding at its beginning, and their mean at its end.

    Args:
        hidden_size: the width H of a stream.
        spec: their number.
    """

    def __init__(self, hidden_size: int, spec: AltUpSpec):
        super().__init__()
        self.hidden_size = hidden_size
        make = functools.partial(Linear, hidden_size, hidden_size, bias=False)
        self.altup_projections = nn.ModuleList(make() for _ in range(spec.count - 1))
        self.altup_unembed_projections = nn.ModuleList(make() for _ in range(spec.count - 1))

    def spread(self, x: Tensor) -> Tensor:
        """x [T, H] -> streams [T, n H]."""
        others = [recompute(_as_large_as, project(x), x) for project in self.altup_projections]
        return torch.cat([x, *others], 1)

    def forward(self, streams: Tensor) -> Tensor:
        """streams [T, n H] -> [T, H]."""
        count = len(self.altup_unembed_projections) + 1
        first, *others = streams.unflatten(-1, (count, -1)).unbind(1)
        projected = zip(self.altup_unembed_projections, others, strict=True)
        return torch.stack(
            [first, *(recompute(_as_large_as, project(x), first) for project, x in projected)]
        ).mean(0)

    def activation_bytes(self, itemsize: int) -> tuple[int, int, int]:
        """Bytes per token: kept by `spread`, the embedding and its projections; kept by `forward`, the
        streams and their projections; and needed in the backward pass of `forward`, the gradients of its
        output, of all streams before the mean, and of one stream and its size in float32.
        """
        count, one = len(self.altup_projections) + 1, itemsize * self.hidden_size
        wide = max(4, itemsize) * (5 if itemsize >= 4 else 7) * self.hidden_size
        return count * one, (2 * count - 1) * one, (count + 1) * one + wide


def make_stream_ends(
    hidden_size: int, spec: StreamsSpec | GatedStreamsSpec | AltUpSpec | None
) -> AltUpEnds | StreamsHead | None:
    """Create the modules of a model's first and last streams; None if there are none."""
    if isinstance(spec, AltUpSpec):
        return AltUpEnds(hidden_size, spec)
    return StreamsHead(hidden_size, spec) if isinstance(spec, StreamsSpec) else None


def spread_streams(x: Tensor, count: int, ends: AltUpEnds | StreamsHead | None) -> Tensor:
    """x [T, H] -> `count` streams [T, n H], equal unless `ends` makes them."""
    return ends.spread(x) if isinstance(ends, AltUpEnds) else x.repeat(1, count)


def _as_large_as(x: Tensor, like: Tensor) -> Tensor:
    """x [T, H] with the root mean square of `like`, in its dtype."""
    wide, sizes = at_least_float32(x), at_least_float32(like)
    # A norm has a gradient at zero, such as at the embedding of padding; a root has none.
    wanted = torch.linalg.vector_norm(sizes, dim=-1, keepdim=True) * like.shape[-1] ** -0.5
    size = wide.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()
    return (wide * (wanted / size)).to(like.dtype)


class Laurel(nn.Module):
    """`x + norm(right(left(x)))`, with a product of low rank.

    Args:
        hidden_size: the width H of x.
        rank: the width of left's output.
        norm: of the product.
    """

    def __init__(self, hidden_size: int, rank: int, norm: NormSpec | LayerNormSpec):
        super().__init__()
        self.linear_left = Linear(hidden_size, rank, bias=False)
        self.linear_right = Linear(rank, hidden_size, bias=False)
        self.post_laurel_norm = make_norm(hidden_size, norm)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes per token: left's output, and the norm's input and statistic."""
        own: int = self.post_laurel_norm.activation_bytes(level, itemsize)
        return own + itemsize * self.linear_left.out_features
