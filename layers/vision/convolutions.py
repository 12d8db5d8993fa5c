"""Projectors that read the grid of patches: convolutions over it (GOT-OCR 2.0, arXiv:2409.01704, section
3.2), pairs of time steps (ERNIE 4.5 VL), and rows of tiles (Phi-4-multimodal, arXiv:2503.01743, section 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.kernels._copies import to_device
from liger_models.layers.grids.rows import by_size, in_rows
from liger_models.layers.parts.mlp import plain_activation
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.convolution import ConvolutionWeights
from liger_models.layers.projections.linear import Linear
from liger_models.layers.specs import (
    ConvolutionProjectorSpec,
    LayerNormSpec,
    PatchSpec,
    ResamplerSpec,
    RowsProjectorSpec,
    StridedProjectorSpec,
    TileRowsSpec,
    TwoWaysSpec,
)
from liger_models.layers.vision.encoder import PatchEmbedding
from liger_models.layers.vision.patch_order import Grid
from liger_models.layers.vision.pictures import TilesOfPictures


class Convolution(ConvolutionWeights):
    """A convolution of 3 times 3 patches with zeros around the grid.

    Args:
        inputs, outputs: numbers of channels.
        stride: distance of neighbouring windows.
        bias: add a bias.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, bias: bool = False):
        super().__init__(outputs, inputs, 3, 3, bias=bias)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """x [pictures, channels, rows, columns] -> the same of `outputs`."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.conv2d(x, self.weight.to(x.dtype), bias, stride=self.stride, padding=1)


class Neck(nn.Module):
    """`norm_2(conv2(norm_1(conv1(x))))` (SAM, arXiv:2304.02643, appendix A; ViTDet, arXiv:2203.16527).

    Args:
        width: of a patch, D.
        channels: the output width C.
    """

    def __init__(self, width: int, channels: int):
        super().__init__()
        self.conv1 = PatchEmbedding(PatchSpec(1, channels=width), channels)
        self.layer_norm1 = make_norm(channels, LayerNormSpec(1e-6))
        self.conv2 = Convolution(channels, channels)
        self.layer_norm2 = make_norm(channels, LayerNormSpec(1e-6))

    def forward(self, x: Tensor) -> Tensor:
        """x [pictures, side, side, D] -> [pictures, C, side, side]."""
        x = self.conv2(self.layer_norm1(self.conv1(x)).permute(0, 3, 1, 2))
        return self.layer_norm2(x.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2)


class ConvolutionProjector(nn.Module):
    """`multimodal_projector(conv_upsampler2(conv_upsampler1(neck(x))))`.

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the grid, and the neck's width.
    """

    def __init__(self, width: int, hidden_size: int, spec: ConvolutionProjectorSpec):
        super().__init__()
        self.side, self.merge = spec.side, spec.merge
        self.neck = Neck(width, spec.channels)
        self.conv_upsampler1 = Convolution(spec.channels, 2 * spec.channels, stride=2)
        self.conv_upsampler2 = Convolution(2 * spec.channels, hidden_size, stride=2)
        self.multimodal_projector = Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], in blocks of 4 times 4 patches -> [P / 16, H]."""
        x = in_rows(x, self.side, self.side, self.merge)
        x = self.conv_upsampler2(self.conv_upsampler1(self.neck(x)))
        return self.multimodal_projector(x.flatten(2).transpose(1, 2).flatten(0, 1))


class StridedProjector(nn.Module):
    """`linear(conv2(conv1(x)))`, convolutions of stride 2 that double the width (Step 3.7).

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the bias of the last layer.
    """

    def __init__(self, width: int, hidden_size: int, spec: StridedProjectorSpec):
        super().__init__()
        self.merge = spec.merge
        self.conv1 = Convolution(width, 2 * width, stride=2, bias=True)
        self.conv2 = Convolution(2 * width, 4 * width, stride=2, bias=True)
        self.linear = Linear(4 * width, hidden_size, bias=spec.bias)

    def forward(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """x [P, D], in blocks of 4 times 4 patches of pictures with these grids -> [P / 16, H]."""
        sizes = [(h, w) for t, h, w in grids for _ in range(t)]
        return self.linear(by_size(x, sizes, self._convolved))

    def _convolved(self, x: Tensor, height: int, width: int) -> Tensor:
        raster = in_rows(x, height, width, self.merge).permute(0, 3, 1, 2)
        return self.conv2(self.conv1(raster)).flatten(2).transpose(1, 2).flatten(0, 1)


class RowsProjector(nn.Module):
    """`after_rms([begin, mlp([proj_out(act(proj_conv(before_rms(x)))), newline] of each row), end])`
    (Hunyuan-VL).

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the merge factor, the norm and the activation.
    """

    def __init__(self, width: int, hidden_size: int, spec: RowsProjectorSpec):
        super().__init__()
        self.merge, self.activation = spec.merge, plain_activation(spec.activation)
        self.before_rms = make_norm(width, spec.norm)
        self.proj_conv = PatchEmbedding(PatchSpec(spec.merge, channels=width, bias=True), 2 * width)
        self.proj_out = PatchEmbedding(PatchSpec(1, channels=2 * width, bias=True), 4 * width)
        self.mlp = Linear(4 * width, hidden_size)
        self.image_newline = nn.Parameter(torch.empty(4 * width))
        self.image_begin = nn.Parameter(torch.empty(hidden_size))
        self.image_end = nn.Parameter(torch.empty(hidden_size))
        self.after_rms = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """x [P, D], in blocks of patches to merge of images with these grids -> [tokens, H], of each image of
        h times w blocks h (w + 1) + 2.
        """
        blocks = self.before_rms(x).unflatten(0, (-1, self.merge**2)).transpose(1, 2)
        x = self.proj_out(self.activation(self.proj_conv(blocks.flatten(1))))
        sizes = [(h // self.merge, w // self.merge) for _, h, w in grids]
        images = [
            torch.cat([own.view(h, w, -1), self.image_newline.to(x.dtype).expand(h, 1, -1)], 1).flatten(0, 1)
            for own, (h, w) in zip(x.split([h * w for h, w in sizes]), sizes, strict=True)
        ]
        lengths = [len(image) for image in images]
        y = self.mlp(torch.cat(images))
        begin, end = (one.to(y.dtype)[None] for one in (self.image_begin, self.image_end))
        framed = [part for image in y.split(lengths) for part in (begin, image, end)]
        made: Tensor = self.after_rms(torch.cat(framed))
        return made

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise the learned features like a matrix."""
        for feature in (self.image_newline, self.image_begin, self.image_end):
            nn.init.normal_(feature, 0.0, std, generator)


class NormedMLP(nn.Module):
    """`norm(linear_2(gelu(linear_1(x))))`, from `width` to `size`."""

    def __init__(self, width: int, size: int, norm: LayerNormSpec):
        super().__init__()
        self.linear_1, self.linear_2 = Linear(width, size), Linear(size, size)
        self.norm = make_norm(size, norm)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., size]."""
        y: Tensor = self.norm(self.linear_2(F.gelu(self.linear_1(x))))
        return y


class Resampler(nn.Module):
    """`norm(linear(temporal(pairs of spatial(merged))))`, with merged the `merge`^2 concatenated patches, and
    pairs those at the same place of two consecutive time steps, or an image's own twice (ERNIE 4.5 VL).

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the merge factor, and the norms.
    """

    def __init__(self, width: int, hidden_size: int, spec: ResamplerSpec):
        super().__init__()
        self.merged = width * spec.merge**2
        self.spatial = NormedMLP(self.merged, self.merged, spec.inner_norm)
        self.temporal = NormedMLP(2 * self.merged, self.merged, spec.inner_norm)
        self.linear = Linear(self.merged, hidden_size)
        self.norm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """x [P, D], in blocks of patches to merge of pictures with these grids -> [P / merge^2, H], of videos
        half as many.
        """
        x = self.spatial(x.reshape(-1, self.merged))
        first = second = x
        if any(t > 1 for t, _, _ in grids):
            patches, merged = sum(t * h * w for t, h, w in grids), len(x)
            sizes = [t * h * w * merged // patches for t, h, w in grids]
            numbers = torch.arange(merged, device="cpu").split(sizes)
            steps = [(own.view(t, -1), t > 1) for own, (t, _, _) in zip(numbers, grids, strict=True)]
            pairs = [torch.stack([own[:: 1 + two], own[two :: 1 + two]]).flatten(1) for own, two in steps]
            of_first, of_second = to_device(torch.cat(pairs, 1), x.device)
            first, second = x.index_select(0, of_first), x.index_select(0, of_second)
        return self.norm(self.linear(self.temporal(torch.cat([first, second], -1))))


class TileRows(nn.Module):
    """`linear_2(gelu(linear_1(rows)))`, with rows the means of a token's patches, and the vectors that end
    rows and separate tiles from the whole.

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: of the projector.
    """

    def __init__(self, width: int, hidden_size: int, spec: TileRowsSpec):
        super().__init__()
        self.ends = RowEnds(width)
        self.linear_1, self.linear_2 = Linear(width, hidden_size), Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, windows: Tensor) -> Tensor:
        """x [P, D], and the numbers of each token's patches, windows [F, 4] on the host -> [F, H]."""
        of_patches = windows[:, 0] >= 0
        order = of_patches.cumsum(0) - 1
        count = int(order[-1]) + 1
        for place, kind in enumerate((TilesOfPictures.ROW_END, TilesOfPictures.SEPARATOR)):
            order = torch.where(windows[:, 0] == kind, count + place, order)
        which = to_device(windows[of_patches].flatten(), x.device)
        means = x.index_select(0, which).unflatten(0, (-1, windows.shape[1])).mean(1)
        rows = torch.cat([means, self.ends().to(x.dtype)])[to_device(order, x.device)]
        return self.linear_2(F.gelu(self.linear_1(rows)))


class RowEnds(nn.Module):
    """The vector that ends a row, and the one that separates tiles from the whole, [width] each."""

    def __init__(self, width: int):
        super().__init__()
        self.row_end = nn.Parameter(torch.empty(width))
        self.separator = nn.Parameter(torch.empty(width))

    def forward(self) -> Tensor:
        """Both, [2, width]."""
        return torch.stack([self.row_end, self.separator])

    def reset_parameters(self, *_: object) -> None:
        """Initialise to zero, as the reference does."""
        nn.init.zeros_(self.row_end)
        nn.init.zeros_(self.separator)


class TwoLayers(nn.Module):
    """`linear_2(gelu(linear_1(x)))`, from `width` to `hidden_size`."""

    def __init__(self, width: int, hidden_size: int):
        super().__init__()
        self.linear_1, self.linear_2 = Linear(width, hidden_size), Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [F, width] -> [F, hidden_size]."""
        y: Tensor = self.linear_2(F.gelu(self.linear_1(x)))
        return y


class TwoWays(nn.Module):
    """Two projections, of frames of sounds alone and of sounds next to images.

    Args:
        width: of a frame, D.
        hidden_size: of the language model, H.
        spec: of the projector.
    """

    def __init__(self, width: int, hidden_size: int, spec: TwoWaysSpec):
        super().__init__()
        self.alone, self.with_images = (TwoLayers(width, hidden_size) for _ in range(2))

    def forward(self, x: Tensor, with_images: Tensor | None = None, both: bool = False) -> Tensor:
        """x [F, D] -> [F, H].

        Args:
            with_images: mask of the frames of sounds next to images, [F] on the host; None: there are none.
            both: run both projections, as other processes may, whatever the frames.
        """
        ways = self.alone, self.with_images
        some = with_images is not None and bool(with_images.any())
        if with_images is None or not some or bool(with_images.all()):
            chosen = int(some)
            y: Tensor = ways[chosen](x)
            return y + 0 * ways[1 - chosen](x[:1]).sum() if both else y
        order = torch.cat([(~with_images).nonzero()[:, 0], with_images.nonzero()[:, 0]])
        count = len(x) - int(with_images.sum())
        rows = x.index_select(0, to_device(order, x.device))
        made = torch.cat([way(part) for way, part in zip(ways, (rows[:count], rows[count:]), strict=True)])
        return made.index_select(0, to_device(order.argsort(), x.device))
