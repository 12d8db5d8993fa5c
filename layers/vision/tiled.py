"""Images cut into square tiles, whose features layers of the language model read (Llama 3.2 Vision,
arXiv:2407.21783, section 7).

    x = patches @ W^T + tanh(a) * before[ratio, tile];   the class token in front of each tile
    x = norm(x + (1 - tanh(g)) * place + tanh(g) * place_in_tiles[ratio, tile])
    x = norm(blocks(x)) + tanh(b) * behind[ratio, tile]
    features = [global blocks(x), what some of the blocks gave] @ W^T + bias

All tiles of an image see one another, as many for each: what is not filled is padding, and so are a few zeros
behind each tile. Tokens of padding do not see one another, but all others see them, as in the reference.
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
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.attention.cross_attention import VisibleTiles
from liger_models.layers.blocks import IMAGES
from liger_models.layers.projections.linear import Linear
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.host_copy import HostCopy
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.tree import Tree
from liger_models.layers.specs import TiledVisionSpec
from liger_models.layers.vision.tiled_encoder import TiledEncoder, TiledImages
from liger_models.layers.vision.vision import is_of_several


class TiledSight:
    """What a call shows a model: its images, if any, and which of their tiles each token sees, [batch, seq,
    images, tiles] as given. `wrong`: whether images and tokens do not fit, a bool on the device.
    """

    def __init__(self, pictures: TiledImages | None, seen: Tensor | None):
        self.pictures, self.seen = pictures, seen
        self.checks: HostCopy | None = None
        self.wrong: Tensor | None = None

    def check(self, tokens: Tensor, images: Tensor, faults: Tensor) -> None:
        """Begin to check how many images the text names, how many are given, and further faults."""
        self.wrong = (tokens != images) | (faults != 0)
        self.checks = HostCopy(torch.stack([tokens, images, faults]))


class TiledVision(nn.Module):
    """An encoder of tiles and its way into a language model, with the methods of `Vision`.

    Args:
        spec: the parts.
        hidden_size: that of the language model, H.
        attention: the attention backend.
    """

    def __init__(self, spec: TiledVisionSpec, hidden_size: int, attention: AttentionBackend = "auto"):
        super().__init__()
        self.spec = spec
        self.encoder = TiledEncoder(spec, attention)
        self.projector = Linear(spec.width, hidden_size)

    def forward(self, pictures: TiledImages) -> tuple[Tensor, ...]:
        """The features of the images of each row, [batch, images * tiles * P, H]. An encoder that is frozen
        keeps nothing.
        """
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.encoder.parameters())
        with torch.set_grad_enabled(trained):
            made = self.encoder(pictures)
        return tuple(self.projector(x).unflatten(0, pictures.ratios.shape).flatten(1, 3) for x in made)

    def ways_out(self) -> list[nn.Module]:
        """What stands between the encoder and the language model."""
        return [self.projector]

    def take(self, keywords: dict[str, Any]) -> TiledSight:
        """What a call shows, which is taken out of its keywords.

        Raises:
            DataError: something is missing, or does not fit.
        """
        given = {name: x for name in KEYWORDS if (x := keywords.pop(name, None)) is not None}
        if not given:
            return TiledSight(None, None)
        if missing := [name for name in KEYWORDS if name not in given]:
            raise DataError(
                f"got {' and '.join(given)} without {' and '.join(missing)}: give all, as the processor does"
            )
        pixels, ratios, filled, seen = (given[name] for name in KEYWORDS)
        spec = self.spec
        size, images = (spec.patches.channels, spec.image_size, spec.image_size), tuple(ratios.shape)
        shapes = {
            "pixel_values": (pixels, (*images[:2], spec.tiles, *size)),
            "aspect_ratio_ids": (ratios, (*pixels.shape[:1], *images[1:2])),
            "aspect_ratio_mask": (filled, (*images[:2], spec.tiles)),
            "cross_attention_mask": (seen, (*images[:1], *seen.shape[1:2], *images[1:2], spec.tiles)),
        }
        for name, (tensor, shape) in shapes.items():
            if tuple(tensor.shape) != shape or tensor.is_floating_point() != (tensor is pixels):
                kind = "floating point" if tensor is pixels else "integers"
                raise DataError(
                    f"{name} must be {kind} of shape {shape}, by the other keywords and the model's tiles; "
                    f"found {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        return TiledSight(TiledImages(pixels, ratios, filled.bool()), seen.bool())

    def prepare(self, sight: TiledSight, sequences: Sequences, input_ids: Tensor | None) -> None:
        """Say which tiles each token sees, and begin to check that images and tokens fit.

        Args:
            input_ids: [batch, seq].

        Raises:
            DataError: no ids, or a mask of other tokens.
        """
        if input_ids is None:
            if sight.pictures is not None:
                raise DataError("images need input_ids, which say where they stand; found embeddings alone")
            return
        named = input_ids == self.spec.image_id
        if sight.pictures is None:
            none = torch.zeros((), dtype=torch.long, device=named.device)
            return sight.check(named.sum(), none, none)
        assert sight.seen is not None
        if sight.seen.shape[:2] != input_ids.shape:
            raise DataError(
                f"cross_attention_mask must begin with the shape of the tokens, {tuple(input_ids.shape)}; "
                f"found {tuple(sight.seen.shape)}"
            )
        ratios, blocks, documents = sight.pictures.ratios, None, sequences.documents
        if sight.seen.device.type == "cpu" and documents.host_cu_seqlens is not None:
            blocks = _blocks(sight.seen[0].any(2), documents.host_cu_seqlens, documents.tree)
        seen = sight.seen.to(named.device, non_blocking=True)
        given = seen.flatten(2)
        reachable = torch.ones_like(given)
        apart = foreign = torch.zeros((), dtype=torch.bool, device=named.device)
        if documents.cu_seqlens is not None and documents.kept is None:  # packed: of documents, not of rows
            own, apart = self._own_images(named, ratios, documents)
            if blocks is not None:
                foreign = (
                    own[0] != _in_blocks(blocks, *own.shape[1:]).to(own.device, non_blocking=True)
                ).any()
            reachable = own[..., None].expand_as(seen).flatten(2)
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
        sight.check(named.sum(), (ratios > 0).sum(), wrong)

    def _own_images(self, named: Tensor, ratios: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
        """Which images of its row belong to each token's document, or to the one that this continues, [batch,
        seq, images]; and whether some document has images that are in another row, a bool on the device.
        """
        bounds, tree = documents.bounds(), documents.tree
        assert bounds is not None  # there are boundaries
        before = F.pad(named.flatten().long().cumsum(0), (1, 0))  # images named in front of each token
        there = ratios > 0
        number = torch.where(there, there.flatten().long().cumsum(0).view(ratios.shape) - 1, -1)[:, None]
        own, count = torch.zeros((), dtype=torch.bool, device=named.device), 0
        for document in (bounds, None if tree is None else tree.continued()):
            if document is not None:
                first, end = before[document.long()].view(2, *named.shape, 1)
                own, count = own | ((number >= first) & (number < end)), count + end - first
        return own, (own.sum(2, keepdim=True) != count).any()

    def place(self, sight: TiledSight | None, embeds: Tensor) -> Tensor:
        """Embeddings [T, H] as they are: nothing stands in the text for images."""
        return embeds

    def handed(self, sight: TiledSight | None, sequences: Sequences) -> dict[str, Tensor]:
        """What layers of the language model read, by name; in generation also of images that are known."""
        cache = sequences.cache
        if sight is not None and sight.pictures is not None:
            images, *_ = self(sight.pictures)
            if cache is not None:
                cache.images = images, sequences.visibility.tiles.last(sequences.documents, cache.lengths)
            return {IMAGES: images}
        if cache is not None and cache.images is not None:
            images, tiles = cache.images
            sequences.visibility = replace(sequences.visibility, tiles=tiles)
            return {IMAGES: images}
        # Layers of the language model read what it gives, and are trained where it is not, too.
        shared = is_of_several(self.encoder, *self.ways_out(), trained=True)
        return self._beside_other_ranks(sequences) if shared else {}

    def _beside_other_ranks(self, sequences: Sequences) -> dict[str, Tensor]:
        """Where a model is of several processes, one without images has a blank one in each row, unseen:
        layers that read images go along, and add nothing.
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

    def add(self, sight: TiledSight, layer: int, x: Tensor) -> Tensor:
        """x [T, H] behind a layer of the language model, as it is."""
        return x

    def finish(self, sight: TiledSight) -> None:
        """Look at what `prepare` has begun to check.

        Raises:
            DataError: images and tokens do not fit.
        """
        if sight.checks is None:
            return
        tokens, images, wrong = sight.checks.tolist()
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
    """Which images each token may see, [tokens, images] bool, on the host."""
    seen = torch.zeros(tokens, images, dtype=torch.bool, device="cpu")
    for first, end, image, last in blocks:
        seen[first:end, image:last] = True
    return seen


def _blocks(seen: Tensor, bounds: list[int], tree: Tree | None) -> list[_Block] | None:
    """Of documents with these bounds in one row, whose tokens see images [T, images] bool, on the host: first
    token, end, first image and end of each. None: an image is seen by no token, they are not in order, or a
    document that continues another has images of its own beside those of that one, or not all of these.
    """
    if not seen.any(0).all() or len(seen) != bounds[-1]:
        return None
    document = torch.bucketize(seen.byte().argmax(0), torch.tensor(bounds[1:]), right=True)
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
