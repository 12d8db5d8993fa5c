"""Vision-language models with their references, and conversations for both: liger_models/images/scenes.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pairs
import torch
from torch import Tensor
from variants import skipped

from liger_models.images.scenes import Document, Image, Scenes, Video
from liger_models.layers.specs import GatedPoolsSpec, IndexerSpec, PlacedPictures, TiledVisionSpec
from liger_models.layers.vision.crops import renumbered
from liger_models.layers.vision.packing import marks_tokens, of_patches

DOCUMENTS: dict[str, Document] = {
    "two images": [2, Image(6, 10), 1, Image(4, 4), 3],
    "a video and an image": [3, Video(3, 4, 6, 1.7), 2, Image(14, 2), 1],
    "none": [21],
    "an image first": [Image(2, 4), 5],
}
TWO: list[Document] = [
    [1, Image(6, 10), 2, Video(3, 4, 2, 1.7), 3],
    [Image(4, 4), 9, Image(16, 6), 7],
]
OF_TOKENS = ("input_ids", "labels", "mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids")


class VisionPair(pairs.Pair):
    """A native vision-language model and its reference."""

    def batch(self, rows: int = 2, length: int = 19) -> dict[str, Tensor]:
        """The default batch of comparisons: rows without padding."""
        return self.rows_of_one_length(TWO)

    def rows_of_one_length(self, documents: Sequence[Document], near_ties: bool = False) -> dict[str, Any]:
        """Pad documents with text to rows of one length; with `near_ties` routers may be near a tie."""
        known = [self._known_to_reference(document) for document in documents]
        return self.scenes.make_even(known) if near_ties else self.clear(lambda: self.scenes.make_even(known))

    def scene(self, *documents: Document, padding: str = "right") -> dict[str, Any]:
        """Call with these documents as rows; videos become images in families that have none."""
        known = [self._known_to_reference(document) for document in documents]
        return self.clear(lambda: self.scenes.make(known, padding))

    def _known_to_reference(self, document: Document) -> Document:
        """Skip cases that transformers computes differently: Kimi K2.5's class takes clips of one time step
        alone, since it splits features by all patches of longer ones (test_clips.py).

        Before 5.23 seconds of videos are whole numbers, and Gemma 4 has another form of videos.
        """
        if getattr(self.vision, "clips", False):
            document = [replace(p, steps=1) if isinstance(p, Video) else p for p in document]
        if getattr(getattr(self.vision, "positions", None), "whole", False):  # positions are whole numbers
            document = [
                replace(p, seconds=math.ceil(p.seconds)) if isinstance(p, Video) else p for p in document
            ]
        if not older_transformers():
            return document
        if isinstance(getattr(self.vision, "pictures", None), PlacedPictures):
            return [Image(p.height, p.width) if isinstance(p, Video) else p for p in document]
        return [replace(p, seconds=math.ceil(p.seconds)) if isinstance(p, Video) else p for p in document]

    @property
    def scenes(self) -> Scenes:
        return Scenes(self.ours.spec, self.config)

    @property
    def needs_whole_documents(self) -> bool:
        """Whether short documents cannot continue others: indexers choose among their tokens, or embeddings
        of n-grams look back.
        """
        blocks = self.ours.spec.blocks
        mixers = (mixer for block in blocks for mixer in block.mixers)
        kinds = IndexerSpec | GatedPoolsSpec
        chooses = any(isinstance(getattr(mixer, "indexer", None), kinds) for mixer in mixers)
        return chooses or any(block.ngrams is not None for block in blocks)

    @property
    def vision(self) -> Any:
        return self.ours.spec.vision

    def images(self, call: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The images of a `VisionConversation`, from a call of one row."""
        kept = {self.vision.kinds} if "pixel_values" in call and marks_tokens(self.vision) else set()
        given = (*OF_TOKENS, "attention_mask")
        return {name: x for name, x in call.items() if name not in given or name in kept}

    def pack(self, calls: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Combine calls of one row each into a call with all documents in one row."""
        tiled, calls = isinstance(self.vision, TiledVisionSpec), renumbered(calls)
        by_row = getattr(getattr(self.vision, "pictures", None), "by_row", False)
        packed = {
            name: torch.cat(
                [call[name] for call in calls if name in call],
                of_patches(self.vision, name) or int(tiled or by_row or name in OF_TOKENS),
            )
            for name in {name for call in calls for name in call} - {"cross_attention_mask", "attention_mask"}
        }
        if tiled:
            seen = [
                call.get("cross_attention_mask", torch.zeros(*call["input_ids"].shape, 0, self.vision.tiles))
                for call in calls
            ]
            blocks = [torch.block_diag(*(x[0, :, :, i] for x in seen)) for i in range(self.vision.tiles)]
            packed["cross_attention_mask"] = torch.stack(blocks, -1)[None].long()
        return packed


def auto_class(model_type: str) -> Any:
    """The Auto class of a family's reference: that of models with images, if it has it."""
    import transformers

    names = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return getattr(transformers, f"AutoModelFor{'ImageTextToText' if model_type in names else 'CausalLM'}")


def older_transformers() -> bool:
    """Return whether transformers is older than 5.23; 5.17 is the oldest supported version."""
    import transformers

    return tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)


def make_pair(family: str, changes: Mapping[str, Any] | None = None, **options: Any) -> VisionPair:
    """`changes` are of keys, or of keys within "text_config" and "vision_config"."""
    changes = copy.deepcopy(dict(changes or {}))
    tiny = pairs.find_architecture(family).tiny
    if family == "paligemma" and older_transformers():  # does not cap PaliGemma 2's logits
        changes.setdefault("text_config", {}).setdefault("final_logit_softcapping", None)
    for part in ("text_config", "vision_config"):
        if part in changes:
            changes[part] = pairs.changed(tiny[part], changes[part])
    made = pairs.make_pair(family, changes, kind=VisionPair, **options)
    assert isinstance(made, VisionPair)
    return made


def rows_of_prompts(pair: VisionPair) -> dict[str, Any]:
    """Prompts of several lengths, padded on the left; with text if the reference's layers count padding."""
    if skipped(pair.architecture.model_type, "padding", "left"):
        return pair.rows_of_one_length(list(DOCUMENTS.values()))
    return pair.scene(*DOCUMENTS.values(), padding="left")
