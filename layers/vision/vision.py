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
from liger_models.layers.vision.positions import TEXT
from liger_models.layers.vision.processor_inputs import take_pictures
from liger_models.layers.vision.projectors import PROJECTORS, further_inputs
from liger_models.layers.vision.vision_inputs import (
    FRAMED,
    WRONG_FRAMED,
    WRONG_KINDS,
    WRONG_RUNS,
    WRONG_START,
    VisionInputs,
    check_shapes,
    framed_kinds,
    kinds_of,
    markers_of,
    meaning_of_kinds,
    with_sounds,
    wrong_marks,
)

Part = Literal["vision", "projector", "language"]
SOUND_OF_VIDEO = "use_audio_in_video"


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
                f"pass them as the processor does ({meaning_of_kinds(self.spec)})"
            )
        return VisionInputs(pictures, kinds, framed)

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
        check_shapes(self.spec, vision_inputs, input_ids)
        ids = sequences.documents.pack(input_ids)
        kinds = kinds_of(self.spec, ids)
        faults = [
            self._set_modality(vision_inputs, sequences, ids, kinds),
            self._set_visibility(vision_inputs, sequences, ids, kinds),
            *self._set_positions(vision_inputs, sequences, ids, kinds),
        ]
        if vision_inputs.pictures is not None and self.spec.marker_ids:
            vision_inputs.markers = markers_of(self.spec, ids)
        vision_inputs.kinds = kinds
        vision_inputs.start_check(self.merge, [fault for fault in faults if fault is not None])

    def _set_modality(
        self, inputs: VisionInputs, sequences: Sequences, ids: Tensor, kinds: Tensor
    ) -> Tensor | None:
        """Set the kinds of tokens that choose experts; the fault of given ones that differ from them."""
        if self.spec.framing_ids is None:
            return None
        framed = framed_kinds(self.spec, ids, kinds)
        sequences.modality = Modality.of(framed != TEXT)
        if inputs.framed is None:
            return None
        return WRONG_FRAMED * (sequences.documents.pack(inputs.framed) != framed).any()

    def _set_visibility(
        self, inputs: VisionInputs, sequences: Sequences, ids: Tensor, kinds: Tensor
    ) -> Tensor | None:
        """Set which tokens attend to one another in both directions; the fault of wrong given kinds."""
        documents, with_images = sequences.documents, inputs.pictures is not None
        spans, marked, wrong = None, None, None
        if inputs.kinds is not None:
            given = documents.pack(inputs.kinds)
            if self.spec.spans == "prefix":
                spans, wrong = prefixes(documents, given)
            elif self.spec.spans == "marked":
                wrong = wrong_marks(given, kinds, with_images)
                marked = given == 1 if with_images else None
            else:
                wrong = (given != with_sounds(self.spec, ids, kinds)).any()
        if with_images and self.spec.spans == "images":
            spans = spans_of(documents, kinds != TEXT)
        if marked is None:
            sequences.visibility = Visibility(documents, spans=spans, with_images=with_images)
        else:
            sequences.visibility = Visibility.of_marks(documents, marked, with_images)
        return None if wrong is None else WRONG_KINDS * wrong

    def _set_positions(
        self, inputs: VisionInputs, sequences: Sequences, ids: Tensor, kinds: Tensor
    ) -> list[Tensor]:
        """Set positions on several axes, unless the caller gave them; faults of the tokens' order."""
        documents, positions, pictures = sequences.documents, sequences.positions, inputs.pictures
        spec, cache = self.spec.positions, sequences.cache
        if positions.axes is not None:  # given by the caller
            if cache is not None:
                _continue_positions(cache, positions.axes, max(0, positions.end - documents.shape[1]))
            return []
        if pictures is None or spec is None:
            return []
        if positions.of_packed:
            raise DataError(
                "position_ids [batch, seq] restart, as for packed documents, but images need positions on "
                "three axes: pass cu_seqlens (cu_seq_lens_q in transformers) without position_ids, or "
                "position_ids [4, batch, seq], whose first axis is this one"
            )
        if positions.given:
            return []
        heard = with_sounds(self.spec, ids, kinds)
        found, end = axes_of(spec, documents, heard, ids, pictures, self.merge, positions.end)
        axes, misfit, joint = found
        if cache is not None:
            _continue_positions(cache, axes, end - positions.end)
        sequences.positions = replace(positions, axes=axes, end=end)
        faults = [WRONG_RUNS * misfit]
        if isinstance(spec, ClockSpec) and joint is not None:
            of_video, of_sound = spec.start_ids
            faults.append(
                WRONG_START * (joint & ((ids.roll(2) != of_video) | (ids.roll(1) != of_sound))).any()
            )
        return faults

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
        all_shown = vision_inputs.finish_check(self.spec, self.merge)
        if all_shown is not None:
            self.all_shown = all_shown


def _continue_positions(cache: KVCache, axes: Tensor, ahead: int) -> None:
    """Continue generation one after the largest position of each sequence, on any axis."""
    lowest = torch.full_like(cache.lengths, -1)
    largest = lowest.scatter_reduce(0, cache.rows, axes.amax(0), "amax")
    cache.shift, cache.ahead = largest + 1 - cache.lengths, ahead
