"""Images cut into square tiles, whose features the language model reads by cross-attention (Llama 3.2 Vision,
arXiv:2407.21783, section 7).

    x = patches @ W^T + tanh(a) * before[ratio, tile];   the class token in front of each tile
    x = norm(x + (1 - tanh(g)) * place + tanh(g) * place_in_tiles[ratio, tile])
    x = norm(blocks(x)) + tanh(b) * after[ratio, tile]
    features = [global blocks(x), outputs of selected blocks] @ W^T + bias

All tiles of an image attend to one another. Images have the same number of tiles: unused tiles are padding,
and each tile is padded with a few zeros. Padding tokens do not attend to one another, but all other tokens
attend to them, as in the reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.convert.errors import DataError
from liger_models.kernels._copies import to_device
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.attention.cross_attention import VisibleTiles
from liger_models.layers.blocks import IMAGES
from liger_models.layers.projections.linear import Linear
from liger_models.layers.sequences.agreement import is_of_several
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.host_copy import HostCopy
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.tree import Tree
from liger_models.layers.specs import TiledVisionSpec
from liger_models.layers.vision.tiled_encoder import TiledEncoder, TiledImages


class TiledVisionInputs:
    """Vision inputs of a call: its images, if any, and the mask of tiles visible to each token, [batch, seq,
    images, tiles] as given. `wrong`: images and tokens do not match, a bool on the device.
    """

    def __init__(self, pictures: TiledImages | None, visible: Tensor | None):
        self.pictures, self.visible = pictures, visible
        self.checks: HostCopy | None = None
        self.wrong: Tensor | None = None

    def check(self, tokens: Tensor, images: Tensor, faults: Tensor) -> None:
        """Start a check of the number of images in the text, the number given, and other faults."""
        self.wrong = (tokens != images) | (faults != 0)
        self.checks = HostCopy(torch.stack([tokens, images, faults]))


class TiledVision(nn.Module):
    """An encoder of tiles and its projection to the language model, with the methods of `Vision`.

    Args:
        spec: the parts.
        hidden_size: of the language model, H.
        attention: the attention backend.
    """

    def __init__(self, spec: TiledVisionSpec, hidden_size: int, attention: AttentionBackend = "auto"):
        super().__init__()
        self.spec = spec
        self.encoder = TiledEncoder(spec, attention)
        self.projector = Linear(spec.width, hidden_size)

    def forward(self, pictures: TiledImages) -> tuple[Tensor, ...]:
        """The features of the images of each row, [batch, images * tiles * P, H]. A frozen encoder saves
        nothing for backward.
        """
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.encoder.parameters())
        with torch.set_grad_enabled(trained):
            made = self.encoder(pictures)
        return tuple(self.projector(x).unflatten(0, pictures.ratios.shape).flatten(1, 3) for x in made)

    def ways_out(self) -> list[nn.Module]:
        """The modules between the encoder and the language model."""
        return [self.projector]

    def take(self, keywords: dict[str, Any]) -> TiledVisionInputs:
        """Remove the vision inputs from a call's keywords and return them.

        Raises:
            DataError: missing or incompatible keywords.
        """
        given = {name: x for name in KEYWORDS if (x := keywords.pop(name, None)) is not None}
        if not given:
            return TiledVisionInputs(None, None)
        if missing := [name for name in KEYWORDS if name not in given]:
            raise DataError(
                f"got {' and '.join(given)} without {' and '.join(missing)}: pass all, as the processor does"
            )
        pixels, ratios, filled, visible = (given[name] for name in KEYWORDS)
        spec = self.spec
        size, images = (spec.patches.channels, spec.image_size, spec.image_size), tuple(ratios.shape)
        shapes = {
            "pixel_values": (pixels, (*images[:2], spec.tiles, *size)),
            "aspect_ratio_ids": (ratios, (*pixels.shape[:1], *images[1:2])),
            "aspect_ratio_mask": (filled, (*images[:2], spec.tiles)),
            "cross_attention_mask": (visible, (*images[:1], *visible.shape[1:2], *images[1:2], spec.tiles)),
        }
        for name, (tensor, shape) in shapes.items():
            if tuple(tensor.shape) != shape or tensor.is_floating_point() != (tensor is pixels):
                kind = "floating point" if tensor is pixels else "integers"
                raise DataError(
                    f"{name} must be {kind} of shape {shape}, by the other keywords and the model's tiles; "
                    f"found {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        return TiledVisionInputs(TiledImages(pixels, ratios, filled.bool()), visible.bool())

    def prepare(
        self, vision_inputs: TiledVisionInputs, sequences: Sequences, input_ids: Tensor | None
    ) -> None:
        """Set the tiles visible to each token, and start the check that images and tokens match.

        Args:
            input_ids: [batch, seq].

        Raises:
            DataError: no ids, or a mask of another shape than the tokens.
        """
        if input_ids is None:
            if vision_inputs.pictures is not None:
                raise DataError("images need input_ids, which mark their places; found only embeddings")
            return
        named = input_ids == self.spec.image_id
        if vision_inputs.pictures is None:
            none = torch.zeros((), dtype=torch.long, device=named.device)
            return vision_inputs.check(named.sum(), none, none)
        assert vision_inputs.visible is not None
        if vision_inputs.visible.shape[:2] != input_ids.shape:
            raise DataError(
                f"cross_attention_mask must begin with the shape of the tokens, {tuple(input_ids.shape)}; "
                f"found {tuple(vision_inputs.visible.shape)}"
            )
        ratios, blocks, documents = vision_inputs.pictures.ratios, None, sequences.documents
        if vision_inputs.visible.device.type == "cpu" and documents.host_cu_seqlens is not None:
            blocks = _blocks(vision_inputs.visible[0].any(2), documents.host_cu_seqlens, documents.tree)
        visible = to_device(vision_inputs.visible, named.device)
        given = visible.flatten(2)
        reachable = torch.ones_like(given)
        apart = foreign = torch.zeros((), dtype=torch.bool, device=named.device)
        if documents.cu_seqlens is not None and documents.kept is None:  # packed: by document instead of row
            own, apart = self._own_images(named, ratios, documents)
            if blocks is not None:
                foreign = (own[0] != to_device(_in_blocks(blocks, *own.shape[1:]), own.device)).any()
            reachable = own[..., None].expand_as(visible).flatten(2)
        given = given & reachable
        shown, reached = given.any(2, keepdim=True), reachable.any(2, keepdim=True)
        mask = torch.where(shown, given, torch.where(reached, reachable, True))
        if blocks is not None:
            count = self.spec.tiles
            blocks = [(first, end, image * count, last * count) for first, end, image, last in blocks]
        tiles = VisibleTiles(mask, documents.pack(reached), documents.pack(shown), blocks)
        sequences.visibility = replace(sequences.visibility, tiles=tiles, with_images=True)
        wrong = ((ratios < 0) | (ratios > self.spec.ratios)).any().long()
        wrong = wrong + 2 * apart.long() + 4 * foreign.long()
        vision_inputs.check(named.sum(), (ratios > 0).sum(), wrong)

    def _own_images(self, named: Tensor, ratios: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
        """Mask of the row's images that belong to each token's document or to its parent document, [batch,
        seq, images]; and a bool on the device, true if a document has images in another row.
        """
        bounds, tree = documents.bounds(), documents.tree
        assert bounds is not None  # boundaries exist
        before = F.pad(named.flatten().long().cumsum(0), (1, 0))  # image tokens before each token
        there = ratios > 0
        number = torch.where(there, there.flatten().long().cumsum(0).view(ratios.shape) - 1, -1)[:, None]
        own, count = torch.zeros((), dtype=torch.bool, device=named.device), 0
        for document in (bounds, None if tree is None else tree.continued()):
            if document is not None:
                first, end = before[document.long()].view(2, *named.shape, 1)
                own, count = own | ((number >= first) & (number < end)), count + end - first
        return own, (own.sum(2, keepdim=True) != count).any()

    def place(self, vision_inputs: TiledVisionInputs | None, embeds: Tensor) -> Tensor:
        """Return the embeddings [T, H] unchanged: images have no feature tokens in the text."""
        return embeds

    def layer_inputs(
        self, vision_inputs: TiledVisionInputs | None, sequences: Sequences
    ) -> dict[str, Tensor]:
        """Named inputs of the language model's layers; in generation also features of earlier images."""
        cache = sequences.cache
        if vision_inputs is not None and vision_inputs.pictures is not None:
            images, *_ = self(vision_inputs.pictures)
            if cache is not None:
                cache.images = images, sequences.visibility.tiles.last(sequences.documents, cache.lengths)
            return {IMAGES: images}
        if cache is not None and cache.images is not None:
            images, tiles = cache.images
            sequences.visibility = replace(sequences.visibility, tiles=tiles)
            return {IMAGES: images}
        # Layers of the language model read its output, and are trained even if the encoder is not.
        shared = is_of_several(self.encoder, *self.ways_out(), trained=True)
        return self._blank_images(sequences) if shared else {}

    def _blank_images(self, sequences: Sequences) -> dict[str, Tensor]:
        """Features of one blank image per row, visible to no token, for processes without images in
        distributed training. The layers that read images then run on all processes, and add nothing.
        """
        spec, documents, device = self.spec, sequences.documents, sequences.device
        rows, seq = documents.shape
        size = spec.patches.channels, spec.image_size, spec.image_size
        pixels = torch.zeros(rows, 1, spec.tiles, *size, device=device)
        ratios = torch.zeros(rows, 1, dtype=torch.long, device=device)
        filled = torch.arange(spec.tiles, device=device).expand(rows, 1, -1) == 0
        none = torch.zeros(documents.num_tokens, 1, dtype=torch.bool, device=device)
        all_of_row = torch.ones(rows, seq, spec.tiles, dtype=torch.bool, device=device)
        tiles = VisibleTiles(all_of_row, none, none)
        sequences.visibility = replace(sequences.visibility, tiles=tiles)
        images, *_ = self(TiledImages(pixels, ratios, filled))
        return {IMAGES: images}

    def add(self, vision_inputs: TiledVisionInputs, layer: int, x: Tensor) -> Tensor:
        """Return x [T, H], the output of a layer of the language model, unchanged."""
        return x

    def finish(self, vision_inputs: TiledVisionInputs) -> None:
        """Wait for the check that `prepare` started.

        Raises:
            DataError: images and tokens do not match.
        """
        if vision_inputs.checks is None:
            return
        tokens, images, wrong = vision_inputs.checks.tolist()
        if wrong & 1:
            raise DataError(f"aspect_ratio_ids must be from 0 (no image) to {self.spec.ratios}")
        if tokens != images:
            raise DataError(
                f"the text names {tokens} images, and pixel_values and aspect_ratio_ids hold {images}; was "
                "the text cut, or an image left out?"
            )
        if wrong & 2:
            raise DataError(
                "the images of a packed document are in another row than some of its text: let rows end "
                "where documents end"
            )
        if wrong & 4:
            raise DataError(
                "cross_attention_mask shows an image to another document than the one whose text names it"
            )


_Block = tuple[int, int, int, int]


def _in_blocks(blocks: Sequence[_Block], tokens: int, images: int) -> Tensor:
    """The mask of images visible to each token, [tokens, images] bool, on the host."""
    visible = torch.zeros(tokens, images, dtype=torch.bool, device="cpu")
    for first, end, image, last in blocks:
        visible[first:end, image:last] = True
    return visible


def _blocks(visible: Tensor, bounds: list[int], tree: Tree | None) -> list[_Block] | None:
    """Summarise a host mask of visible images [T, images] bool by document of one row: first token, end,
    first image and end. Return None if an image is visible to no token, images are out of order, or a
    continuation of a document has images of its own in addition to its parent's, or misses some of these.
    """
    if not visible.any(0).all() or len(visible) != bounds[-1]:
        return None
    document = torch.bucketize(visible.byte().argmax(0), torch.tensor(bounds[1:]), right=True)
    ends = torch.bincount(document, minlength=len(bounds) - 1).cumsum(0).tolist()
    if bool((document.diff() < 0).any()):
        return None
    images = list(zip([0, *ends], ends, strict=False))
    continued = [] if tree is None else zip(tree.parents, tree.before, strict=True)
    for number, (parent, before) in enumerate(continued):
        if parent >= 0:
            of_its_own = images[number][0] < images[number][1]
            if of_its_own or before < bounds[parent + 1] - bounds[parent]:
                return None
            images[number] = images[parent]
    return [(*tokens, *own) for tokens, own in zip(itertools.pairwise(bounds), images, strict=True)]


KEYWORDS = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask")
