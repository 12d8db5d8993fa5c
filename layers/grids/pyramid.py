"""An encoder of square images by convolutions, MobileNetV5 of Gemma 3n (after MobileNetV4, arXiv:2404.10518).

    edge block       x + norm(W_2 gelu(norm(conv(x))))                 where stride and channels allow the sum
    inverted block   x + gamma * norm(W_2 gelu(norm(conv'(gelu(norm(W_1 norm(conv(x))))))))
    query block      x + gamma * W_o attention(W_q n, W_k norm(conv(n)), W_v norm(conv'(n))),   n = norm(x)
    fusion           norm(mean(norm(W_2 gelu(norm(W_1 [x, x' enlarged])))))    of the last two stages x, x'

Convolutions conv are depthwise, but in edge blocks; matrices W act on the channels of a pixel.
Norms are RMSNorms over channels. Tensors are [images, rows, columns, channels]. Zeros around an image make
ceil(n / stride) pixels of n: where their number is odd, one more follows the image. Only the inputs of blocks
are kept for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.attention.fused import unmasked_attention
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.convolution import ConvolutionWeights
from liger_models.layers.projections.linear import as_wide_as
from liger_models.layers.recompute.activation_memory import recompute, set_levels
from liger_models.layers.specs import (
    EdgeBlockSpec,
    InvertedBlockSpec,
    NormSpec,
    PatchSpec,
    PyramidSpec,
    QueryBlockSpec,
    VisionSpec,
)


class PyramidEncoder(nn.Module):
    """Encode images for the projector. Has no layers whose level of activation memory could be chosen.

    Args:
        spec: with a `pyramid`.

    Raises:
        ValueError: with parts that this encoder does not have.
    """

    def __init__(self, spec: VisionSpec):
        super().__init__()
        assert spec.pyramid is not None
        check_parts(spec)
        self.spec, self.layers = spec, nn.ModuleList()
        pyramid = spec.pyramid
        self.conv_stem = ConvolutionNorm(spec.patches.channels, pyramid.stem, pyramid, 3, stride=2, bias=True)
        channels, made, ends = pyramid.stem, [], []
        for stage in pyramid.stages:
            blocks: list[nn.Module] = []
            for block in stage:
                blocks.append(BLOCKS_OF_PYRAMIDS[type(block)](channels, block, pyramid))
                channels = getattr(block, "channels", channels)
            made.append(nn.ModuleList(blocks))
            ends.append(channels)
        self.blocks = nn.ModuleList(made)
        self.msfa = Fusion(sum(ends[-2:]), spec.hidden_size, pyramid)

    def forward(self, pictures: Any) -> tuple[Tensor, ...]:
        """Return the projector's input, [P, D], for `Pictures` of P patches."""
        assert self.spec.pyramid is not None
        images = whole_images(pictures.patches, self.spec.patches, side := pictures.grids[0][1])
        x, states = recompute(self.conv_stem, images), []
        for stage in self.blocks:
            for block in cast(nn.ModuleList, stage):
                x = recompute(block, x)
            states.append(x)
        x = recompute(self.msfa, *states[-2:], side)
        return (x.flatten(0, 2) * self.spec.pyramid.scale,)

    def set_activation_memory(self, levels: str | Sequence[str]) -> None:
        """Call `set_levels` on no layers."""
        set_levels(cast(Any, self.layers), levels)


def check_parts(spec: VisionSpec) -> None:
    """Refuse parts of encoders of patches.

    Raises:
        ValueError: there is one.
    """
    plain = cast(Any, VisionSpec)(
        *(spec.hidden_size, PatchSpec(spec.patches.size, channels=spec.patches.channels), ()),
        *(spec.projector, spec.image_id, spec.video_id),
        **{name: getattr(spec, name) for name in ("pictures", "kinds", "spans", "added", "unsaid")},
        **{name: getattr(spec, name) for name in ("audio_id", "marker_ids", "framing_ids", "pyramid")},
    )
    if spec != plain:
        found = [
            field.name for field in fields(spec) if getattr(spec, field.name) != getattr(plain, field.name)
        ]
        raise ValueError(f"an encoder by convolutions does not have {', '.join(found)}")


def numbers_kept(spec: VisionSpec, side: int) -> tuple[int, int]:
    """Numbers that an image of `side` times `side` pixels keeps for the backward pass, the inputs of blocks,
    and those that a block saves at most when it runs again, with the gradient of the largest.
    """
    assert spec.pyramid is not None
    channels, side, kept = spec.pyramid.stem, -(-side // 2), spec.patches.channels * side**2
    most, ends = 4 * channels * side**2, []
    for stage in spec.pyramid.stages:
        for block in stage:
            kept += channels * side**2
            after = -(-side // (1 if isinstance(block, QueryBlockSpec) else block.stride))
            if isinstance(block, QueryBlockSpec):
                width = block.num_attention_heads * block.head_dim
                within, largest = (2 * width + 3 * channels) * side**2, width * side**2
            else:
                inner, last = channels * block.expansion, block.channels
                largest = inner * (side if getattr(block, "middle", 0) else after) ** 2
                within = 3 * largest + 2 * last * after**2
                if isinstance(block, InvertedBlockSpec):
                    within += (3 * inner * after**2 if block.middle else 0) + 2 * channels * side**2
                channels = last
            most, side = max(most, within + largest), after
        ends.append(channels * side**2)
    fused = spec.pyramid.expansion * 4 * ends[-1] + 4 * spec.hidden_size * (2 * side) ** 2
    return kept + sum(ends[-2:]), max(most, fused)


def whole_images(patches: Tensor, spec: PatchSpec, side: int) -> Tensor:
    """Patches [P, channels * size^2], `side` times `side` an image -> [images, rows, columns, channels]."""
    x = patches.unflatten(1, (spec.channels, spec.size, spec.size)).unflatten(0, (-1, side, side))
    return x.permute(0, 1, 4, 2, 5, 3).flatten(3, 4).flatten(1, 2)


class Convolution(ConvolutionWeights):
    """A convolution with zeros around the image.

    Args:
        inputs, outputs: numbers of channels.
        kernel: pixels on a side.
        stride: distance of neighbouring windows.
        depthwise: each output reads the input of the same number alone.
        bias: add a bias.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        stride: int = 1,
        depthwise: bool = False,
        bias: bool = False,
    ):
        groups = inputs if depthwise else 1
        super().__init__(outputs, inputs // groups, kernel, kernel, bias=bias)
        self.stride, self.groups = stride, groups

    def forward(self, x: Tensor) -> Tensor:
        """x [images, rows, columns, inputs] -> the same of `outputs`, in the weight's dtype."""
        weight, bias = self.weight, as_wide_as(self.weight, self.bias)
        x, kernel = x.to(weight.dtype), weight.shape[-1]
        if kernel == 1:
            return F.linear(x, weight.flatten(1), bias)
        around: list[int] = []
        for size in (x.shape[2], x.shape[1]):
            zeros = max(0, (math.ceil(size / self.stride) - 1) * self.stride + kernel - size)
            around += zeros // 2, zeros - zeros // 2
        x = F.pad(x, (0, 0, *around)).permute(0, 3, 1, 2)
        return F.conv2d(x, weight, bias, self.stride, groups=self.groups).permute(0, 2, 3, 1)


def norm_of(channels: int, pyramid: PyramidSpec) -> Any:
    """An RMSNorm over the channels of a pixel."""
    return make_norm(channels, NormSpec(pyramid.eps, cast="gemma"))


def activated(x: Tensor) -> Tensor:
    """The approximate GELU, with a hyperbolic tangent."""
    return F.gelu(x, approximate="tanh")


class ConvolutionNorm(nn.Module):
    """A convolution and a norm, and the activation if it is `active`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        pyramid: PyramidSpec,
        kernel: int = 1,
        *,
        stride: int = 1,
        depthwise: bool = False,
        bias: bool = False,
        active: bool = True,
    ):
        super().__init__()
        self.conv = Convolution(inputs, outputs, kernel, stride, depthwise, bias)
        self.bn, self.active = norm_of(outputs, pyramid), active

    def forward(self, x: Tensor) -> Tensor:
        """x [images, rows, columns, inputs] -> the same of `outputs`."""
        x = self.bn(self.conv(x))
        return activated(x) if self.active else x


class ChannelScale(nn.Module):
    """A trained factor of each channel."""

    def __init__(self, channels: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., channels] -> the same."""
        return x * self.gamma.to(x.dtype)

    def reset_parameters(self, *_: object) -> None:
        """Initialise to 1e-5, as the reference does."""
        nn.init.constant_(self.gamma, 1e-5)


class EdgeBlock(nn.Module):
    """See above.

    Args:
        inputs: the number of channels of the input.
        spec: of the block.
        pyramid: with the eps of norms.
    """

    def __init__(self, inputs: int, spec: EdgeBlockSpec, pyramid: PyramidSpec):
        super().__init__()
        inner = inputs * spec.expansion
        self.conv_exp = Convolution(inputs, inner, spec.kernel, spec.stride)
        self.bn1 = norm_of(inner, pyramid)
        self.conv_pwl = Convolution(inner, spec.channels)
        self.bn2 = norm_of(spec.channels, pyramid)
        self.adds = inputs == spec.channels and spec.stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """x [images, rows, columns, inputs] -> [images, rows / stride, columns / stride, channels]."""
        y: Tensor = self.bn2(self.conv_pwl(activated(self.bn1(self.conv_exp(x)))))
        return x + y if self.adds else y


class InvertedBlock(nn.Module):
    """See above.

    Args:
        inputs: the number of channels of the input.
        spec: of the block.
        pyramid: with the eps of norms.
        alone: without a scale and the sum.
    """

    def __init__(self, inputs: int, spec: InvertedBlockSpec, pyramid: PyramidSpec, alone: bool = False):
        super().__init__()
        inner, last = inputs * spec.expansion, cast(Any, {"pyramid": pyramid, "active": False})
        self.dw_start = self.dw_mid = self.layer_scale = None
        if spec.start:
            stride = 1 if spec.middle else spec.stride
            self.dw_start = ConvolutionNorm(
                inputs, inputs, kernel=spec.start, stride=stride, depthwise=True, **last
            )
        self.pw_exp = ConvolutionNorm(inputs, inner, pyramid)
        if spec.middle:
            self.dw_mid = ConvolutionNorm(
                inner, inner, pyramid, spec.middle, stride=spec.stride, depthwise=True
            )
        self.pw_proj = ConvolutionNorm(inner, spec.channels, **last)
        if not alone:
            self.layer_scale = ChannelScale(spec.channels)
        self.adds = inputs == spec.channels and spec.stride == 1 and not alone

    def forward(self, x: Tensor) -> Tensor:
        """x [images, rows, columns, inputs] -> [images, rows / stride, columns / stride, channels]."""
        y = x
        for part in (self.dw_start, self.pw_exp, self.dw_mid, self.pw_proj, self.layer_scale):
            y = y if part is None else part(y)
        return x + y if self.adds else y


class Projected(nn.Module):
    """Queries, keys, values, or the output of attention, of each pixel; with a stride of fewer pixels."""

    def __init__(self, inputs: int, outputs: int, pyramid: PyramidSpec, kernel: int = 0, stride: int = 1):
        super().__init__()
        self.down_conv = self.norm = None
        if stride > 1:
            self.down_conv = Convolution(inputs, inputs, kernel, stride, depthwise=True)
            self.norm = norm_of(inputs, pyramid)
        self.proj = Convolution(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """x [images, rows, columns, inputs] -> the same of `outputs`."""
        if self.down_conv is not None and self.norm is not None:
            x = self.norm(self.down_conv(x))
        return cast(Tensor, self.proj(x))


class QueryAttention(nn.Module):
    """Attention of all pixels of an image to one another, whose heads share keys and values.

    Args:
        channels: of the input and the output.
        spec: the heads, and the stride of keys and values.
        pyramid: with the eps of norms.
    """

    def __init__(self, channels: int, spec: QueryBlockSpec, pyramid: PyramidSpec):
        super().__init__()
        width, fewer = spec.num_attention_heads * spec.head_dim, (spec.kernel, spec.stride)
        self.head_dim = spec.head_dim
        self.query = Projected(channels, width, pyramid)
        self.key, self.value = (Projected(channels, spec.head_dim, pyramid, *fewer) for _ in range(2))
        self.output = Projected(width, channels, pyramid)

    def forward(self, x: Tensor) -> Tensor:
        """x [images, rows, columns, channels] -> the same."""
        # The heads of a pixel are queries of one head, since they share keys and values.
        q, k, v = (
            made.flatten(1).unflatten(1, (1, -1, self.head_dim))
            for made in (self.query(x), self.key(x), self.value(x))
        )
        made = unmasked_attention(q, k, v, self.head_dim**-0.5, causal=False)
        return cast(Tensor, self.output(made.reshape(*x.shape[:3], -1)))


class QueryBlock(nn.Module):
    """See above.

    Args:
        inputs: the number of channels.
        spec: of the block.
        pyramid: with the eps of norms.
    """

    def __init__(self, inputs: int, spec: QueryBlockSpec, pyramid: PyramidSpec):
        super().__init__()
        self.norm, self.attn = norm_of(inputs, pyramid), QueryAttention(inputs, spec, pyramid)
        self.layer_scale = ChannelScale(inputs)

    def forward(self, x: Tensor) -> Tensor:
        """x [images, rows, columns, inputs] -> the same."""
        return x + cast(Tensor, self.layer_scale(self.attn(self.norm(x))))


BLOCKS_OF_PYRAMIDS: dict[type, Any] = {
    EdgeBlockSpec: EdgeBlock,
    InvertedBlockSpec: InvertedBlock,
    QueryBlockSpec: QueryBlock,
}


class Fusion(nn.Module):
    """See above.

    Args:
        inputs, outputs: numbers of channels, the former of both inputs together.
        pyramid: the expansion.
    """

    def __init__(self, inputs: int, outputs: int, pyramid: PyramidSpec):
        super().__init__()
        self.ffn = InvertedBlock(inputs, InvertedBlockSpec(outputs, pyramid.expansion), pyramid, alone=True)
        self.norm = norm_of(outputs, pyramid)

    def forward(self, x: Tensor, smaller: Tensor, side: int) -> Tensor:
        """x [images, rows, columns, channels] and a smaller one -> [images, side, side, outputs]."""
        larger = F.interpolate(smaller.permute(0, 3, 1, 2), size=x.shape[1:3], mode="nearest")
        made = self.ffn(torch.cat([x, larger.permute(0, 2, 3, 1)], -1))
        block = made.shape[1] // side
        blocks = made.unflatten(2, (side, block)).unflatten(1, (side, block))
        return cast(Tensor, self.norm(blocks.mean((2, 4))))
