"""The image encoder: a linear layer over patches, and blocks in which the patches of a picture attend to one
another.

    x = patches @ W^T + b,        [P, D] of all pictures of a batch, without padding, in some normalised
    a class token or other learned tokens, a norm, in some families
    blocks as in a language model, with bidirectional attention
    a norm, in some families

Positions are the row and column of a patch in its picture, each of which rotates half of a head; or these
and its time step, each of which rotates a third.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.kernels._copies import to_device
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks import BLOCKS, Block, add_and_norm, run_block
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.parts.window_merger import WindowMerger
from liger_models.layers.projections.convolution import ConvolutionWeights
from liger_models.layers.projections.linear import as_wide_as
from liger_models.layers.recompute.activation_memory import set_levels
from liger_models.layers.recompute.offload import Offload
from liger_models.layers.sequences.sequences import Grids, Sequences
from liger_models.layers.specs import GridConvSpec, PatchSpec, VisionSpec
from liger_models.layers.vision.patch_order import Grid, windows_of
from liger_models.layers.vision.pictures import Pictures, TilesOfPictures
from liger_models.layers.vision.position_table import make_table


class PatchEmbedding(ConvolutionWeights):
    """A linear layer over patches, whose weight has the shape of a convolution's, as in checkpoints.

    Args:
        spec: the size of a patch.
        width: the output width D.
    """

    def __init__(self, spec: PatchSpec, width: int):
        sides = (spec.frames, spec.size, spec.size) if spec.frames > 1 else (spec.size, spec.size)
        super().__init__(width, spec.channels, *sides, bias=spec.bias)

    def forward(self, patches: Tensor) -> Tensor:
        """patches [P, channels * frames * size^2] -> [P, D]."""
        return F.linear(
            patches.to(self.weight.dtype), self.weight.flatten(1), as_wide_as(self.weight, self.bias)
        )


class ClassToken(nn.Module):
    """A learned vector [width], an additional first or last token of each picture."""

    def __init__(self, width: int, place: str):
        super().__init__()
        self.weight, self.place = nn.Parameter(torch.empty(width)), place

    def forward(self, x: Tensor, pictures: int) -> Tensor:
        """x [P, D] of `pictures` pictures of one size -> [P + pictures, D]."""
        return self.among(x, self.weight.to(x.dtype), pictures)

    def among(self, x: Tensor, own: Tensor, pictures: int) -> Tensor:
        """Insert `own` [...] at each picture's class token into x [P, ...]."""
        rows, own = x.unflatten(0, (pictures, -1)), own.expand(pictures, 1, *x.shape[1:])
        return torch.cat([own, rows] if self.place == "first" else [rows, own], 1).flatten(0, 1)

    def dropped(self, x: Tensor, pictures: int) -> Tensor:
        """x without class tokens."""
        rows = x.unflatten(0, (pictures, -1))
        return (rows[:, 1:] if self.place == "first" else rows[:, :-1]).flatten(0, 1)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise like a matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)


class PrefixTokens(nn.Module):
    """Learned vectors [count, width], tokens before the patches of each picture."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """x [P, D], of pictures of these numbers of patches -> [P + count * pictures, D]."""
        own = self.weight.to(x.dtype)
        return torch.cat([part for picture in x.split(list(lengths)) for part in (own, picture)])

    def dropped(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """x without these tokens."""
        count = len(self.weight)
        parts = x.split([n for length in lengths for n in (count, length)])
        return torch.cat(parts[1::2])

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise like a matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)


Run = Callable[[list[Tensor], Sequences, dict[str, Tensor]], Tensor]
"""The layers and the norm after them: ([x [P, D]], sequences, nothing) -> [P, D]."""
RecordedRun = Callable[[list[Tensor], Sequences, dict[str, Tensor], Run], Tensor]


class VisionEncoder(nn.Module):
    """Encode patches for the projector.

    Args:
        spec: the blocks and their windows.
        attention: the attention backend, see layers/attention/backends.py.

    Attributes:
        recorded: runs the layers as CUDA graphs, if they were asked for (`Decoder.set_cuda_graphs`). Layers
            with windows of their own, that read the sizes of pictures, or with further outputs, run as
            without.

    Raises:
        ValueError: a merger that the encoder does not support.
    """

    def __init__(self, spec: VisionSpec, attention: AttentionBackend = "auto"):
        super().__init__()
        self.spec = spec
        self.recorded: RecordedRun | None = None
        self.patch_embed = PatchEmbedding(spec.patches, spec.hidden_size)
        self.class_token = None
        if spec.class_token is not None:
            self.class_token = ClassToken(spec.hidden_size, spec.class_token)
        self.prefix = PrefixTokens(spec.prefix_tokens, spec.hidden_size) if spec.prefix_tokens else None
        self.table = make_table(spec)
        self.norm_pixels = self.norm_patches = self.norm_before = self.norm_after = None
        if spec.norm_pixels is not None:
            self.norm_pixels = make_norm(spec.patches.width, spec.norm_pixels)
            self.axes = {"height": spec.patches.size, "channels": spec.patches.channels}
        if spec.norm_patches is not None:
            self.norm_patches = make_norm(spec.hidden_size, spec.norm_patches)
        if spec.norm_before is not None:
            self.norm_before = make_norm(spec.hidden_size, spec.norm_before)
        layers = [
            BLOCKS[block.topology](spec.hidden_size, block, i, attention)
            for i, block in enumerate(spec.blocks)
        ]
        self.layers: Sequence[Block] = cast(Any, nn.ModuleList(layers))
        self.window_merger = None  # not `merger`, which is a projector within the tower of several families
        if spec.merger is not None:
            _check_merger(spec, spec.merger.after)
            self.window_merger = WindowMerger(spec.hidden_size, spec.merger, spec.projector.merge)
        if spec.norm_after is not None:
            self.norm_after = make_norm(spec.hidden_size, spec.norm_after)
        reads_grids = any(isinstance(block.mixer, GridConvSpec) for block in spec.blocks)
        self.is_plain = not (spec.deep or spec.taken or spec.merger or reads_grids)

    def forward(self, pictures: Pictures) -> tuple[Tensor, ...]:
        """Return the projector's input, [P, D], or wider if it concatenates several layers; and the outputs
        of the layers at `deep`, in ascending order. Rows are in the order of the pictures' patches, or with
        `clips` in that of the patches of their first time steps, or with a `merger` one per window.
        """
        merge, device = self.spec.merge, pictures.patches.device
        x = self._embedded(pictures)
        ropes = tuple(dict.fromkeys(rope for block in self.spec.blocks for rope in block.ropes))
        lengths = [n + (self.class_token is not None) + self.spec.prefix_tokens for n in pictures.lengths]
        frames, order = Sequences.of_lengths(lengths, device), None
        hidden = pictures.hidden if isinstance(pictures, TilesOfPictures) and any(pictures.hidden) else None
        if hidden is not None:
            frames.visibility = replace(frames.visibility, hidden=tuple(hidden))
        seen_by = [frames] * len(self.layers)
        if self.spec.window is not None and self.spec.windowed:
            order, lengths = windows_of(pictures.grids, merge, self.spec.window)
            x = _by_blocks(x, to_device(order, device), merge)
            windows = Sequences.of_lengths(lengths, device)
            for number in self.spec.windowed:
                seen_by[number] = windows
        if ropes:
            places = to_device(self._places(pictures, order, len(lengths)), device)
            frames.positions = replace(frames.positions, axes=places)
        frames.prepare_rotary(ropes)
        frames.grids = Grids(tuple((h, w) for t, h, w in pictures.grids for _ in range(t)), merge)
        for sequences in seen_by:
            sequences.positions = frames.positions
        if self.spec.merger is not None:
            lengths = [n // self.spec.merger.merge**2 for n in lengths]
            first = self.spec.merger.after + 1
            seen_by[first:] = [Sequences.of_lengths(lengths, device)] * len(seen_by[first:])
        alone = order is None and hidden is None and self.is_plain
        if alone and self.recorded is not None and torch.is_grad_enabled():
            made: tuple[Tensor, ...] = (self.recorded([x], frames, {}, self._run_alone),)
        else:
            made = self._run(x, seen_by)
        if self.class_token is not None and not self.spec.class_feature:
            made = tuple(self.class_token.dropped(x, len(lengths)) for x in made)
        if self.prefix is not None:
            made = tuple(self.prefix.dropped(x, pictures.lengths) for x in made)
        if order is not None:
            back = to_device(order.argsort(), device)
            made = tuple(_by_blocks(x, back, merge) for x in made)
        return tuple(_means_over_time(x, pictures.grids) for x in made) if self.spec.clips else made

    def _places(self, pictures: Pictures, order: Tensor | None, count: int) -> Tensor:
        """The row and column of each token of `count` pictures, and with `joined_steps` its time step, on the
        host; `order` is of their blocks.
        """
        places = pictures.places(self.spec.merge)
        if self.spec.joined_steps:
            places = torch.cat([places, pictures.steps()[None]])
        if order is not None:
            places = _by_blocks(places.T, order, self.spec.merge).T
        if self.class_token is not None:  # not rotated: its position is 0
            places = self.class_token.among(places.T + 1, torch.zeros_like(places[:, 0]), count).T
        return places

    def _run_alone(self, first: list[Tensor], sequences: Sequences, _: dict[str, Tensor]) -> Tensor:
        (made,) = self._run(first.pop(), [sequences] * len(self.layers))
        return made

    def _run(self, x: Tensor, seen_by: Sequence[Sequences]) -> tuple[Tensor, ...]:
        """The layers, and the norm after them: the result, and the outputs of the layers at `deep`."""
        residual, offload = None, Offload()
        kept = {*self.spec.deep, *(state - 1 for state in self.spec.taken)}
        states = {-1: x} if self.spec.taken else {}
        merges_after = None if self.spec.merger is None else self.spec.merger.after
        for number, (layer, sequences) in enumerate(zip(self.layers, seen_by, strict=True)):
            x, residual = run_block(layer, x, residual, sequences, offload=offload)
            if number in kept:
                x, residual = x if residual is None else x + residual, None
                states[number] = x
            if self.window_merger is not None and number == merges_after:
                x, residual = self.window_merger(x if residual is None else x + residual), None
        if self.spec.taken:
            x = torch.cat([states[state - 1] for state in self.spec.taken], -1)
        elif self.norm_after is not None:
            x = add_and_norm(self.norm_after, x, residual)[0]
        else:
            x = x if residual is None else x + residual
        return x, *(states[number] for number in sorted(self.spec.deep))

    def recorded_parts(self) -> list[nn.Module]:
        """The modules that `recorded` runs."""
        return [*self.layers, *([] if self.norm_after is None else [self.norm_after])]

    def _embedded(self, pictures: Pictures) -> Tensor:
        """The input of the blocks."""
        x = pictures.patches
        if self.norm_pixels is not None:
            assert self.norm_pixels.weight is not None
            x = self.norm_pixels(x.to(self.norm_pixels.weight.dtype))
        x = self.patch_embed(x)
        x = x if self.norm_patches is None else self.norm_patches(x)
        if self.class_token is not None:
            x = self.class_token(x, len(pictures.lengths))
        if self.table is not None:
            places = self.table(pictures.grids, self.spec.merge)
            if isinstance(pictures, TilesOfPictures) and any(pictures.hidden):
                table: Any = self.table
                places = table.with_first(places, [h * w for _, h, w in pictures.grids], pictures.hidden)
            x = x + places.to(x.dtype)
        if self.prefix is not None:
            x = self.prefix(x, pictures.lengths)
        return x if self.norm_before is None else self.norm_before(x)

    def set_activation_memory(self, levels: str | Sequence[str]) -> None:
        """Call `set_levels` on all layers."""
        set_levels(self.layers, levels)


def _check_merger(spec: VisionSpec, after: int) -> None:
    others = (spec.class_token, spec.prefix_tokens, spec.windowed, spec.deep, spec.taken, spec.clips)
    if any(others) or any(block.ropes for block in spec.blocks):
        raise ValueError(
            "a merger is for encoders without rotary positions, windows, tokens of their own and outputs of "
            "several layers"
        )
    if not 0 <= after < len(spec.blocks):
        raise ValueError(f"the merger follows layer {after} of {len(spec.blocks)}")


def _means_over_time(x: Tensor, grids: Sequence[Grid]) -> Tensor:
    """The mean over the time steps of each clip, [P, D] -> [patches of one step of each, D]."""
    if all(t == 1 for t, _, _ in grids):
        return x
    clips = x.split([t * h * w for t, h, w in grids])
    return torch.cat(
        [clip.unflatten(0, (t, -1)).mean(0) for clip, (t, _, _) in zip(clips, grids, strict=True)]
    )


def _by_blocks(x: Tensor, order: Tensor, merge: int) -> Tensor:
    """Reorder the blocks of merge^2 patches in x [P, ...]."""
    return x.unflatten(0, (-1, merge**2))[order].flatten(0, 1)
