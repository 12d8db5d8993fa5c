"""The vision part of a language model: an encoder, a projector, and the replacement of image tokens by
features.

embeddings of tokens [T, H], those with the image's id replaced by features, in the order of the images; in
some families features are added to them
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from liger_models.convert.errors import DataError
from liger_models.kernels._copies import to_device
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.grids.anyres import Newline
from liger_models.layers.grids.pyramid import PyramidEncoder
from liger_models.layers.sequences.agreement import is_of_several
from liger_models.layers.sequences.cache import KVCache
from liger_models.layers.sequences.host_copy import HostCopy
from liger_models.layers.sequences.modality import Modality
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.spans import prefixes, spans_of
from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import AnyresPictures, ClockSpec, GridPictures, VisionSpec
from liger_models.layers.vision.canvas import axes_of
from liger_models.layers.vision.compressed_encoder import CompressedEncoder
from liger_models.layers.vision.encoder import VisionEncoder
from liger_models.layers.vision.patch_order import Grid, cut, whole_blocks
from liger_models.layers.vision.pictures import Pictures, TiledPictures, blank_picture, replaced
from liger_models.layers.vision.positions import IMAGE, SOUND, TEXT, VIDEO
from liger_models.layers.vision.processor_inputs import HIDDEN_IN_PART, take_pictures
from liger_models.layers.vision.projectors import PROJECTORS, further_inputs

Part = Literal["vision", "projector", "language"]
SOUND_OF_VIDEO = "use_audio_in_video"
FRAMED = "moe_mm_token_type_ids"
"""Keyword with the kinds of tokens that choose experts: tokens that frame a picture are of its kind."""


class VisionInputs:
    """Vision inputs of a call: its pictures, if any, and the kinds of its tokens.

    Attributes:
        kinds: kind of each token, as processors number them; [batch, seq] as given, later [T].
        framed: the same with the tokens that frame pictures, as given.
        deep: features added after the first layers of the language model, [F, H] each, in order.
        markers: number of each token in `VisionSpec.marker_ids`, [T], -1 for others; None: there are none.
        checks: counts of picture tokens, and faults, on their way to the host.
        wrong: pictures and tokens do not match, a bool on the device.
    """

    def __init__(self, pictures: Pictures | None, kinds: Tensor | None, framed: Tensor | None = None):
        self.pictures, self.kinds, self.framed = pictures, kinds, framed
        self.deep: list[Tensor] = []
        self.markers: Tensor | None = None
        self.checks: HostCopy | None = None
        self.wrong: Tensor | None = None
        self._places: tuple[Tensor, Tensor] | None = None

    def expected(self, merge: int) -> tuple[int, int]:
        """The number of tokens that images and videos need."""
        return (0, 0) if self.pictures is None else self.pictures.features(merge)

    def places(self, merge: int) -> tuple[Tensor, Tensor]:
        """Mask of the tokens with features, [T, 1] bool, and the feature index of each token, [T]."""
        if self._places is None:
            assert self.pictures is not None
            assert self.kinds is not None
            count = sum(self.pictures.features(merge))
            is_image, is_video = self.kinds == IMAGE, self.kinds == VIDEO
            images = self.pictures.features(merge)[0]
            number = torch.where(is_image, is_image.cumsum(0), images + is_video.cumsum(0)) - 1
            seen, number = is_image | is_video, number.clamp(0, count - 1)
            if self.pictures.shown is not None:  # the features of those with tokens, in their order
                each = count // len(self.pictures.grids)
                order = (self.pictures.shown == 0).to(torch.uint8).argsort(stable=True)
                number = order[number // each] * each + number % each
            if self.markers is not None:  # their features follow the pictures'
                marked = self.markers >= 0
                seen, number = seen | marked, torch.where(marked, count + self.markers, number)
            self._places = seen[:, None], number
        return self._places


class Vision(nn.Module):
    """An image encoder and its projection to a language model.

    Args:
        spec: the parts.
        hidden_size: of the language model, H.
        attention: the attention backend.

    Raises:
        ValueError: incompatible parts.
    """

    def __init__(self, spec: VisionSpec, hidden_size: int, attention: AttentionBackend = "auto"):
        super().__init__()
        if spec.spans in ("prefix", "marked") and spec.kinds is None:
            raise ValueError(f"the spans are {spec.spans!r}, but no keyword marks them: kinds is None")
        if spec.class_feature and (spec.class_token is None or spec.merge > 1):
            raise ValueError(
                "class_feature is for encoders with a class_token whose projector merges no patches; found "
                f"class_token={spec.class_token!r} and merge={spec.merge}"
            )
        if spec.prefix_tokens and (spec.class_token or spec.windowed or any(b.ropes for b in spec.blocks)):
            raise ValueError(
                "prefix_tokens are for encoders without a class_token, windows and rotary positions"
            )
        if max(spec.taken, default=0) > len(spec.blocks):
            raise ValueError(f"taken is {spec.taken}, of an encoder of {len(spec.blocks)} layers")
        if spec.clips and not isinstance(spec.pictures, GridPictures):
            raise ValueError("clips are videos with a grid, but pictures is not a GridPictures")
        self.spec, self.merge = spec, spec.merge
        self.all_shown = False  # in the last call no images filled up rows: the next need not wait for that
        self.encoder: nn.Module
        if spec.pyramid is not None:
            self.encoder = PyramidEncoder(spec)
        elif spec.query_encoder is not None:
            self.encoder = CompressedEncoder(spec, attention)
        else:
            self.encoder = VisionEncoder(spec, attention)
        width, make = spec.feature_size, PROJECTORS[type(spec.projector)]
        self.projector = make(width * max(len(spec.taken), 1), hidden_size, spec.projector)
        # Access by name: transformers orders these modules differently.
        self._parts_of_projector = tuple(name for name, _ in self.projector.named_children())
        self.newline = Newline(hidden_size) if isinstance(spec.pictures, AnyresPictures) else None
        self.deep = nn.ModuleList([make(width, hidden_size, spec.deep_projector) for _ in spec.deep])

    def forward(self, pictures: Pictures) -> tuple[Tensor, ...]:
        """Return the features of all pictures, [F, H], images first, then videos, unless they are `layered`;
        and the features to add after the layers `feature_layers` of the language model. A frozen encoder
        saves nothing for backward.
        """
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.encoder.parameters())
        with torch.set_grad_enabled(trained):
            made = tuple(map(pictures.pooled, self.encoder(pictures)))
            whole = whole_blocks(pictures.grids, self.merge)
            if whole is not None:
                whole = to_device(whole.nonzero()[:, 0], made[0].device)
                made = tuple(x[whole] for x in made)
        last, *deep = made
        projectors = (self.deep[self.spec.deep.index(layer)] for layer in sorted(self.spec.deep))
        features = self.projector(last, *further_inputs(self.spec.projector, pictures))
        layered = features if isinstance(features, tuple) else (features,)
        if self.newline is not None and isinstance(pictures, TiledPictures):
            layered = tuple(self.newline(x, pictures.taps, pictures.sizes) for x in layered)
        return *layered, *(project(x) for project, x in zip(projectors, deep, strict=True))

    def ways_out(self) -> list[nn.Module]:
        """The modules between the encoder and the language model."""
        of_projector = (getattr(self.projector, name) for name in self._parts_of_projector)
        found = (self.projector, *of_projector, self.newline, self.deep)
        return [module for module in found if module is not None]

    def cut(self, picture: Tensor) -> tuple[Tensor, Grid]:
        """Cut a picture, or a video, into `pixel_values` and one row of the grids: see `cut` in
        layers/vision/pictures.py.
        """
        raster = isinstance(self.spec.pictures, GridPictures) and self.spec.pictures.raster
        return cut(picture, self.spec.patches, self.merge, raster)

    def take(self, keywords: dict[str, Any]) -> VisionInputs:
        """Remove the vision inputs from a call's keywords and return them.

        Raises:
            DataError: missing or incompatible keywords.
        """
        name = self.spec.kinds  # ignored otherwise
        kinds = None if name is None else keywords.pop(name, None)
        framed = None if self.spec.framing_ids is None else keywords.pop(FRAMED, None)
        if isinstance(self.spec.positions, ClockSpec):
            keywords.pop(SOUND_OF_VIDEO, None)  # the tokens say it for each video
        values = keywords.get("pixel_values")
        pictures = take_pictures(self.spec, self.merge, keywords, self.all_shown)
        if pictures is not None and pictures.shown is None and isinstance(values, Tensor):
            self.all_shown = values.dim() == 5 and pictures.images == values.shape[:2].numel()
        if name is not None and pictures is not None and kinds is None:
            raise DataError(
                f"got images without {name}, by which tokens get their positions or attend to one another: "
                f"pass them as the processor does ({self._meaning})"
            )
        return VisionInputs(pictures, kinds, framed)

    @property
    def _meaning(self) -> str:
        """Description of the token kinds, for errors."""
        if self.spec.spans == "prefix":
            return (
                "0 for a document's prefix, whose tokens all attend to one another, 1 for the tokens to learn"
            )
        if self.spec.spans == "marked":
            return (
                f"1 for the tokens of images, {self.spec.image_id}, and for those that frame them, 0 "
                "elsewhere, and 0 everywhere without images"
            )
        videos = "" if self.spec.video_id is None else f", 2 where they are {self.spec.video_id} (videos)"
        sounds = "" if self.spec.audio_id is None else f", 3 where they are {self.spec.audio_id} (sounds)"
        return f"1 where input_ids are {self.spec.image_id} (images){videos}{sounds}, and 0 elsewhere"

    def prepare(self, vision_inputs: VisionInputs, sequences: Sequences, input_ids: Tensor | None) -> None:
        """Set the positions of the tokens, and start the check that pictures and tokens match.

        Args:
            input_ids: [batch, seq].

        Raises:
            DataError: kinds of another shape than the tokens, or pictures without ids.
        """
        if input_ids is None:
            if vision_inputs.pictures is not None:
                raise DataError("images need input_ids, which mark their places; found only embeddings")
            return
        documents, positions, spans, marked = sequences.documents, sequences.positions, None, None
        ids = documents.pack(input_ids)
        found = torch.where(ids == self.spec.image_id, IMAGE, TEXT)
        if self.spec.video_id is not None:
            found = torch.where(ids == self.spec.video_id, VIDEO, found)
        counts = [(found == IMAGE).sum(), (found == VIDEO).sum()]
        for name, given in ((self.spec.kinds, vision_inputs.kinds), (FRAMED, vision_inputs.framed)):
            if given is not None and given.shape != input_ids.shape:
                raise DataError(
                    f"{name} must have the shape of the tokens, {tuple(input_ids.shape)}; found "
                    f"{tuple(given.shape)}"
                )
        if self.spec.framing_ids is not None:
            framed = self._framed(ids, found)
            sequences.modality = Modality.of(framed != TEXT)
            if vision_inputs.framed is not None:
                counts.append(3 * (documents.pack(vision_inputs.framed) != framed).any().long())
        if vision_inputs.kinds is not None:
            kinds = documents.pack(vision_inputs.kinds)
            if self.spec.spans == "prefix":
                spans, wrong = prefixes(documents, kinds)
            elif self.spec.spans == "marked":
                marked, wrong = self._marks(kinds, found, vision_inputs)
            elif self.spec.audio_id is None:
                wrong = (kinds != found).any()
            else:
                wrong = (kinds != torch.where(ids == self.spec.audio_id, SOUND, found)).any()
            counts.append(wrong.long())
        if vision_inputs.pictures is not None and self.spec.marker_ids:
            markers = torch.full_like(ids, -1)
            for number, marker in enumerate(self.spec.marker_ids):
                markers = torch.where(ids == marker, number, markers)
            vision_inputs.markers = markers
        if vision_inputs.pictures is not None and self.spec.spans == "images":
            spans = spans_of(documents, found != TEXT)
        with_images = vision_inputs.pictures is not None
        vision_inputs.kinds = found
        sequences.visibility = (
            Visibility(documents, spans=spans, with_images=with_images)
            if marked is None
            else Visibility.of_marks(documents, marked, with_images)
        )
        if positions.of_packed and positions.axes is None and with_images and self.spec.positions:
            raise DataError(
                "position_ids [batch, seq] begin anew, as those of packed documents, and are not those of "
                "images, which have three axes: pass cu_seqlens (cu_seq_lens_q in transformers) without "
                "them, or [4, batch, seq] with the positions on the axes after these"
            )
        if positions.axes is not None:  # given by the caller
            if sequences.cache is not None:
                ahead = max(0, positions.end - documents.shape[1])
                _continue_positions(sequences.cache, positions.axes, ahead)
        elif vision_inputs.pictures is not None and self.spec.positions is not None and not positions.given:
            heard = found if self.spec.audio_id is None else found.where(ids != self.spec.audio_id, SOUND)
            pictures, spec = vision_inputs.pictures, self.spec.positions
            found_axes, end = axes_of(spec, documents, heard, ids, pictures, self.merge, positions.end)
            axes, misfit, joint = found_axes
            if isinstance(self.spec.positions, ClockSpec) and joint is not None:
                of_video, of_sound = self.spec.positions.start_ids
                counts.append(5 * (joint & ((ids.roll(2) != of_video) | (ids.roll(1) != of_sound))).any())
            if sequences.cache is not None:
                _continue_positions(sequences.cache, axes, end - positions.end)
            sequences.positions = replace(positions, axes=axes, end=end)
            counts.append(2 * misfit.long())
        images: Any
        images, videos = vision_inputs.expected(self.merge)
        shown, hidden = None if vision_inputs.pictures is None else vision_inputs.pictures.shown, None
        if shown is not None:
            hidden = (shown == 0).sum()
            images = images - hidden * (images // len(shown))
            counts.append(4 * (shown == 2).any().long())
        counted = torch.stack(counts)
        vision_inputs.wrong = (counted[0] != images) | (counted[1] != videos) | counted[2:].any()
        if hidden is not None:
            counted = torch.cat([counted, hidden[None]])
        vision_inputs.checks = HostCopy(counted)

    def _framed(self, ids: Tensor, kinds: Tensor) -> Tensor:
        """Kinds of tokens ids [T], in which those that frame a picture have its kind."""
        assert self.spec.framing_ids is not None
        for number, framing in enumerate(self.spec.framing_ids):
            kinds = torch.where(ids == framing, IMAGE if number < 2 else VIDEO, kinds)
        return kinds

    def _marks(self, kinds: Tensor, found: Tensor, inputs: VisionInputs) -> tuple[Tensor | None, Tensor]:
        """The tokens [T] that attend to one another, bool; None without pictures. And whether kinds are
        wrong, a bool on the device.
        """
        if inputs.pictures is None:
            return None, (kinds != 0).any()
        return kinds == 1, ((kinds < 0) | (kinds > 1) | ((found == IMAGE) & (kinds != 1))).any()

    def place(self, vision_inputs: VisionInputs | None, embeds: Tensor) -> Tensor:
        """Replace the embeddings [T, H] of picture tokens by features, or add these to them."""
        if vision_inputs is None or vision_inputs.pictures is None:
            return embeds if vision_inputs is None else self._blank_images(embeds)
        seen, number = vision_inputs.places(self.merge)
        if self.spec.layered:
            vision_inputs.deep = list(self(vision_inputs.pictures))
            return embeds.masked_fill(seen, 0)
        features, *vision_inputs.deep = self(vision_inputs.pictures)
        return replaced(embeds, features, seen, number, self.spec.added)

    def _blank_images(self, embeds: Tensor) -> Tensor:
        """Run a blank picture through an encoder shared with other processes, if this one has no pictures:
        they would wait for it otherwise. The embeddings do not change.
        """
        if not is_of_several(self.encoder, *self.ways_out()):
            return embeds
        features = self(blank_picture(self.spec, self.merge, embeds))
        if not any(x.requires_grad for x in features):
            return embeds
        return embeds + 0 * torch.stack([x.sum() for x in features]).sum().to(embeds.dtype)

    def ids_of_text(self, vision_inputs: VisionInputs, ids: Tensor, instead: int) -> Tensor:
        """ids [T] with `instead` in place of picture tokens."""
        return ids if vision_inputs.kinds is None else torch.where(vision_inputs.kinds == TEXT, ids, instead)

    def layer_inputs(self, vision_inputs: VisionInputs | None, sequences: Sequences) -> dict[str, Tensor]:
        """Named inputs of the language model's layers: none."""
        return {}

    def add(self, vision_inputs: VisionInputs, layer: int, x: Tensor) -> Tensor:
        """Add the features for this layer to the picture tokens in its output x [T, H]; -1: in its input."""
        if not vision_inputs.deep or layer not in self.spec.feature_layers:
            return x
        seen, number = vision_inputs.places(self.merge)
        features = vision_inputs.deep[self.spec.feature_layers.index(layer)]
        return x + torch.where(seen, features.to(x.dtype)[number], 0)

    def finish(self, vision_inputs: VisionInputs) -> None:
        """Wait for the check that `prepare` started.

        Raises:
            DataError: pictures and tokens do not match.
        """
        if vision_inputs.checks is None:
            return
        images, videos, *faults = vision_inputs.checks.tolist()
        expected = vision_inputs.expected(self.merge)
        if vision_inputs.pictures is not None and vision_inputs.pictures.shown is not None:
            hidden, count = faults.pop(), len(vision_inputs.pictures.shown)
            self.all_shown = hidden == 0
            expected = expected[0] - hidden * (expected[0] // count), expected[1]
        if 4 in faults:
            raise DataError(HIDDEN_IN_PART)
        if (images, videos) != expected:
            raise DataError(
                f"the text has {images} tokens of images and {videos} of videos, and the pixels make "
                f"{expected[0]} and {expected[1]}; was the text cut, or an image left out?"
            )
        if 1 in faults:
            raise DataError(f"{self.spec.kinds} must be {self._meaning}")
        if 3 in faults:
            raise DataError(
                f"{FRAMED} must be {self._meaning}, but as for pictures where input_ids are the tokens "
                f"before or after one, {self.spec.framing_ids}"
            )
        if 5 in faults and isinstance(self.spec.positions, ClockSpec):
            raise DataError(
                "tokens of a video and of a sound alternate, but not after the tokens that begin a video and "
                f"a sound, {self.spec.positions.start_ids}: was the text changed after the processor made it?"
            )
        if 2 in faults:
            raise DataError(
                "the runs of image tokens in the text are not those of the grids, one for each picture and "
                "as long: are the images in the order of the text, with text between them?"
            )


def _continue_positions(cache: KVCache, axes: Tensor, ahead: int) -> None:
    """Continue generation one after the largest position of each sequence, on any axis."""
    lowest = torch.full_like(cache.lengths, -1)
    largest = lowest.scatter_reduce(0, cache.rows, axes.amax(0), "amax")
    cache.shift, cache.ahead = largest + 1 - cache.lengths, ahead
