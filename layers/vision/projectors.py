"""Project the encoder's patch features to the width of the language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.kernels import rms_norm
from liger_models.layers.parts.embedder import Embedder
from liger_models.layers.parts.mlp import plain_activation
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.specs import (
    AdapterSpec,
    ConvolutionProjectorSpec,
    DownsamplingProjectorSpec,
    EmbedderSpec,
    EndedProjectorSpec,
    GatedProjectorSpec,
    LayerNormSpec,
    LinearProjectorSpec,
    MistralMergerSpec,
    MLPProjectorSpec,
    PatchMergerSpec,
    PatchSpec,
    PoolProjectorSpec,
    ProjectorSpec,
    ResamplerSpec,
    RowsProjectorSpec,
    StridedProjectorSpec,
    TileRowsSpec,
    TwiceProjectedSpec,
    TwoWaysSpec,
    VisualWordsSpec,
)
from liger_models.layers.vision.attention_projectors import OF_QUERIES
from liger_models.layers.vision.convolutions import (
    ConvolutionProjector,
    Resampler,
    RowsProjector,
    StridedProjector,
    TileRows,
    TwoWays,
)
from liger_models.layers.vision.encoder import PatchEmbedding
from liger_models.layers.vision.pictures import Pictures, PicturesInWindows, QueriedPictures


class PatchMerger(nn.Module):
    """`linear_2(gelu(linear_1(merged)))`, with merged the concatenated norms of `merge`^2 patches (Qwen2-VL,
    arXiv:2409.12191, section 2); with a width of its own `linear` of these.

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the merge factor, the norm and the width.
    """

    def __init__(self, width: int, hidden_size: int, spec: PatchMergerSpec):
        super().__init__()
        self.merged, self.norm_merged = width * spec.merge**2, spec.norm_merged
        self.norm = make_norm(self.merged if spec.norm_merged else width, spec.norm)
        self.linear_1 = Linear(self.merged, self.merged)
        self.linear_2 = Linear(self.merged, spec.size or hidden_size)
        self.linear = None if spec.size is None else Linear(spec.size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], in blocks of patches to merge -> [P / merge^2, H]."""
        x = x.view(-1, self.merged) if self.norm_merged else x
        x = self.norm(x).view(-1, self.merged)
        x = self.linear_2(F.gelu(self.linear_1(x)))
        return x if self.linear is None else self.linear(x)


class MistralMerger(nn.Module):
    """`linear_2(act(linear_1(merging_layer(merged))))`, with merged the norms of `merge`^2 patches,
    interleaved by channel (Mistral Small 3.1).

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the merge factor, the norm, the activation and the biases.
    """

    def __init__(self, width: int, hidden_size: int, spec: MistralMergerSpec):
        super().__init__()
        self.patches, self.activation = spec.merge**2, plain_activation(spec.activation)
        self.norm = make_norm(width, spec.norm)
        self.merging_layer = Linear(width * self.patches, width, bias=False)
        self.linear_1 = Linear(width, hidden_size, bias=spec.bias)
        self.linear_2 = Linear(hidden_size, hidden_size, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], in blocks of patches to merge -> [P / merge^2, H]."""
        blocks = self.norm(x).unflatten(0, (-1, self.patches))
        merged = self.merging_layer(blocks.transpose(1, 2).flatten(1))
        return self.linear_2(self.activation(self.linear_1(merged)))


class LinearProjector(nn.Module):
    """`linear(norm(mean of merge^2 patches))` (Gemma 3, arXiv:2503.19786, section 2.2), or of all of them
    side by side (Idefics 3, arXiv:2408.12637, section 3.1).

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the merge factor, the norm, and the bias.
    """

    def __init__(self, width: int, hidden_size: int, spec: LinearProjectorSpec):
        super().__init__()
        self.patches, self.concatenated = spec.merge**2, spec.concatenated
        self.norm = None if spec.norm is None else make_norm(width, spec.norm)
        self.linear = Linear(width * (self.patches if spec.concatenated else 1), hidden_size, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], in blocks of patches -> [P / merge^2, H]."""
        if self.patches > 1 and not self.concatenated:
            x = x.unflatten(0, (-1, self.patches)).mean(1)
        x = x if self.norm is None else self.norm(x)
        return self.linear(x.reshape(-1, self.linear.in_features))


class EndedProjector(nn.Module):
    """`linear(x)`, and a learned vector `end` after each image.

    Args:
        width: of a feature, D.
        hidden_size: of the language model, H.
        spec: of the projector.
    """

    def __init__(self, width: int, hidden_size: int, spec: EndedProjectorSpec):
        super().__init__()
        self.linear = Linear(width, hidden_size)
        self.end = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Tensor, _: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """x [F, D] of images with these numbers of tokens, `sizes` -> [F + images, H]."""
        images, end = self.linear(x).split([size - 1 for size in sizes]), self.end.to(x.dtype)[None]
        return torch.cat([part for image in images for part in (image, end)])

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise `end` like a matrix."""
        nn.init.normal_(self.end, 0.0, std, generator)


class MLPProjector(nn.Module):
    """`linear_2(act(linear_1(norm(concatenated merge^2 patches))))` (LLaVA 1.5, arXiv:2310.03744, section
    3.3), with or without a norm of each patch.

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the merge factor, the norms, the inner width, the activation and the biases.
    """

    def __init__(self, width: int, hidden_size: int, spec: MLPProjectorSpec):
        super().__init__()
        self.merged, self.activation = width * spec.merge**2, plain_activation(spec.activation)
        self.patch_norm = None if spec.patch_norm is None else make_norm(width, spec.patch_norm)
        self.norm = None if spec.norm is None else make_norm(self.merged, spec.norm)
        inner = hidden_size if spec.size is None else spec.size
        self.linear_1 = Linear(self.merged, inner, bias=spec.bias)
        self.linear_2 = Linear(inner, hidden_size, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], in blocks of patches to merge -> [P / merge^2, H]."""
        x = (x if self.patch_norm is None else self.patch_norm(x)).reshape(-1, self.merged)
        return self.linear_2(self.activation(self.linear_1(x if self.norm is None else self.norm(x))))


class Adapter(nn.Module):
    """`linear_1(gelu(fc2(gelu(fc1(concatenated merge^2 patches)))))` (Llama 4), and a norm (Muse Glimmer).

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the merge factor, the intermediate width, the norm, and the order of channels.
    """

    def __init__(self, width: int, hidden_size: int, spec: AdapterSpec):
        super().__init__()
        self.patches, self.interleaved = spec.merge**2, spec.interleaved
        self.fc1 = Linear(width * self.patches, spec.size, bias=False)
        self.fc2 = Linear(spec.size, spec.size, bias=False)
        self.linear_1 = Linear(spec.size, hidden_size, bias=False)
        self.norm = None if spec.norm is None else make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], in blocks of patches to merge -> [P / merge^2, H]."""
        blocks = x.unflatten(0, (-1, self.patches))
        # Not a permuted weight: adapters on fc1 read its input.
        merged = blocks.transpose(1, 2) if self.interleaved else blocks
        x = F.gelu(self.fc1(merged.flatten(1)))
        x = self.linear_1(F.gelu(self.fc2(x)))
        return x if self.norm is None else self.norm(x)


class PoolProjector(nn.Module):
    """`linear(rms((sqrt(D) * mean of merge^2 patches - std_bias) * std_scale))` (Gemma 4).

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the merge factor, the norm's eps, and whether features are standardised.
    """

    std_bias: Tensor
    std_scale: Tensor

    def __init__(self, width: int, hidden_size: int, spec: PoolProjectorSpec):
        super().__init__()
        self.spec, self.scale = spec, width**0.5
        if spec.standardized:
            self.register_buffer("std_bias", torch.zeros(width))
            self.register_buffer("std_scale", torch.ones(width))
        self.linear = Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], in blocks of patches -> [P / merge^2, H]."""
        pooled = x.unflatten(0, (-1, self.spec.merge**2)).float().mean(1).to(x.dtype).float() * self.scale
        if self.spec.standardized:
            pooled = (pooled - self.std_bias.float()) * self.std_scale.float()
        return self.linear(rms_norm(pooled.to(x.dtype), None, self.spec.eps))

    def reset_parameters(self, *_: Any) -> None:
        """Initialise the standardisation to the identity."""
        if self.spec.standardized:
            nn.init.zeros_(self.std_bias)
            nn.init.ones_(self.std_scale)


class GatedProjector(nn.Module):
    """`linear_2(silu(gate) * y)`, y | gate = linear_1(norm(concatenated merge^2 patches)) (Aya Vision,
    arXiv:2505.08751, section 3.1).

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the merge factor, the norm, and the width of y and gate together.
    """

    def __init__(self, width: int, hidden_size: int, spec: GatedProjectorSpec):
        super().__init__()
        self.merged = width * spec.merge**2
        self.norm = None if spec.norm is None else make_norm(self.merged, spec.norm)
        self.linear_1 = Linear(self.merged, spec.size)
        self.linear_2 = Linear(spec.size // 2, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], in blocks of patches to merge -> [P / merge^2, H]."""
        x = x.reshape(-1, self.merged)
        y, gate = self.linear_1(x if self.norm is None else self.norm(x)).chunk(2, dim=-1)
        return self.linear_2(F.silu(gate) * y)


class DownsamplingProjector(nn.Module):
    """`down_proj(act(gate_proj(y)) * up_proj(y))`, y = gelu(norm(linear(downsample(merge^2 patches))))
    (GLM-4.1V, arXiv:2507.01006). `downsample` is a convolution whose windows do not overlap. With a limit
    the outputs of `gate_proj` are clamped to it, and those of `up_proj` to both sides of zero.

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the merge factor, the intermediate width and the activation.
    """

    def __init__(self, width: int, hidden_size: int, spec: DownsamplingProjectorSpec):
        super().__init__()
        self.patches, self.activation = spec.merge**2, plain_activation(spec.activation)
        self.limit = spec.limit
        self.downsample = PatchEmbedding(PatchSpec(spec.merge, channels=width, bias=True), hidden_size)
        self.linear = Linear(hidden_size, hidden_size, bias=False)
        self.norm = make_norm(hidden_size, LayerNormSpec(1e-5))
        self.gate_proj = Linear(hidden_size, spec.size, bias=False)
        self.up_proj = Linear(hidden_size, spec.size, bias=False)
        self.down_proj = Linear(spec.size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], in blocks of patches to merge -> [P / merge^2, H]."""
        blocks = x.unflatten(0, (-1, self.patches)).transpose(1, 2)  # [P / merge^2, D, merge^2]
        x = F.gelu(self.norm(self.linear(self.downsample(blocks.flatten(1)))))
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down_proj(self.activation(gate) * up)


class TwiceProjected(nn.Module):
    """`merge_linear_2(gelu(merge_linear_1(merged)))`, with merged the concatenated
    `linear_2(gelu(linear_1(patch)))` of `merge`^2 patches (MiniMax-M3).

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the merge factor and the inner width.
    """

    def __init__(self, width: int, hidden_size: int, spec: TwiceProjectedSpec):
        super().__init__()
        self.merged = hidden_size * spec.merge**2
        self.linear_1, self.linear_2 = Linear(width, spec.size), Linear(spec.size, hidden_size)
        self.merge_linear_1 = Linear(self.merged, spec.size)
        self.merge_linear_2 = Linear(spec.size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], in blocks of patches to merge -> [P / merge^2, H]."""
        merged = self.linear_2(F.gelu(self.linear_1(x))).view(-1, self.merged)
        return self.merge_linear_2(F.gelu(self.merge_linear_1(merged)))


class WordTable(nn.Module):
    """Embeddings of visual words, [words, hidden_size], and of markers after them."""

    def __init__(self, words: int, markers: int, hidden_size: int):
        super().__init__()
        self.words, self.weight = words, nn.Parameter(torch.empty(words + markers, hidden_size))

    def forward(self, probabilities: Tensor) -> Tensor:
        """probabilities [F, words] -> [F + markers, H]: means of the words' rows, and the markers'."""
        weight = self.weight.to(probabilities.dtype)
        return torch.cat([probabilities @ weight[: self.words], weight[self.words :]])

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise like a matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)


class VisualWords(nn.Module):
    """`softmax(norm(linear(concatenated merge^2 patches))) @ table` (Ovis, arXiv:2405.20797, section 3.1).

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the merge factor, and the numbers of words and markers.
    """

    def __init__(self, width: int, hidden_size: int, spec: VisualWordsSpec):
        super().__init__()
        self.merged = width * spec.merge**2
        self.linear = Linear(self.merged, spec.size, bias=False)
        self.norm = make_norm(spec.size, LayerNormSpec(1e-5))
        self.table = WordTable(spec.size, spec.markers, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], in blocks of patches to merge -> [P / merge^2 + markers, H]."""
        return self.table(self.norm(self.linear(x.reshape(-1, self.merged))).softmax(-1))


PROJECTORS: dict[type, type[nn.Module]] = {
    **OF_QUERIES,
    PoolProjectorSpec: PoolProjector,
    VisualWordsSpec: VisualWords,
    ResamplerSpec: Resampler,
    RowsProjectorSpec: RowsProjector,
    AdapterSpec: Adapter,
    ConvolutionProjectorSpec: ConvolutionProjector,
    StridedProjectorSpec: StridedProjector,
    DownsamplingProjectorSpec: DownsamplingProjector,
    GatedProjectorSpec: GatedProjector,
    TwiceProjectedSpec: TwiceProjected,
    PatchMergerSpec: PatchMerger,
    MistralMergerSpec: MistralMerger,
    LinearProjectorSpec: LinearProjector,
    EndedProjectorSpec: EndedProjector,
    MLPProjectorSpec: MLPProjector,
    TileRowsSpec: TileRows,
    TwoWaysSpec: TwoWays,
    EmbedderSpec: Embedder,
}
OF_GRIDS = (StridedProjectorSpec, ResamplerSpec, RowsProjectorSpec)
"""Projectors that read the pictures' grids, too."""


def further_inputs(spec: ProjectorSpec, pictures: Pictures) -> tuple[Any, ...]:
    """A projector's inputs in addition to the encoded patches."""
    if isinstance(pictures, PicturesInWindows):
        return (pictures.windows,)
    if isinstance(pictures, QueriedPictures):
        return pictures.lengths, pictures.sizes
    return (pictures.grids,) if isinstance(spec, OF_GRIDS) else ()
