"""The images and sounds of a call, and the parts of a model that encode them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from liger_models.layers.audio.audio import AudioInputs
from liger_models.layers.blocks import IMAGES, Block
from liger_models.layers.experts.modal_experts import ModalExperts
from liger_models.layers.parts.embedder import embed_own_ids, embeds_ids


class Media(NamedTuple):
    """Images and sounds of a call.

    Attributes:
        vision: inputs of the image encoder; None: the model has none, or the call cannot have images.
        audio: inputs of the audio encoder, likewise.
    """

    vision: Any = None
    audio: AudioInputs | None = None

    @property
    def pictures(self) -> Any:
        """The images and videos, if any."""
        return None if self.vision is None else self.vision.pictures

    @property
    def sounds(self) -> Any:
        """The sounds, if any."""
        return None if self.audio is None else self.audio.sounds


NO_MEDIA = Media()


class MediaParts(nn.Module):
    """A decoder's encoders.

    Attributes:
        vision, audio: encoders of images and of sounds, with their projectors; None: there is none.
    """

    embed_tokens: nn.Embedding
    layers: Sequence[Block]
    vision: Any
    audio: Any

    def take_media(self, keywords: dict[str, Any]) -> Media:
        """Remove images and sounds from a call's keywords and return them.

        Raises:
            DataError: missing or incompatible keywords.
        """
        return Media(*(None if part is None else part.take(keywords) for part in (self.vision, self.audio)))

    def embed_ids(self, ids: Tensor | None) -> Tensor:
        """Embeddings [..., H] of ids [...] of all vocabularies: the language model's, and projectors' own."""
        assert ids is not None  # there are ids or embeddings: ensured by `batch_shape`
        embeds: Tensor = self.embed_tokens(ids)
        for part in (self.vision, self.audio):
            embeds = embed_own_ids(part, ids, embeds)
        return embeds

    def with_inputs(self, media: Media) -> list[tuple[Any, Any]]:
        """The encoders with inputs, and these."""
        pairs = zip((self.vision, self.audio), media, strict=True)
        return [(part, inputs) for part, inputs in pairs if part is not None and inputs is not None]

    def finish_media(self, media: Media) -> None:
        """Wait for the checks of a prepared call that images and sounds match the tokens.

        Raises:
            DataError: they do not.
        """
        for part, inputs in self.with_inputs(media):
            part.finish(inputs)

    def parts_of_images(self) -> list[nn.Module]:
        """Modules that only images reach: the encoder, the projector, layers that read features, and experts
        of pictures.
        """
        modules: list[Any] = [layer for layer in self.layers if IMAGES in layer.reads]
        experts = (getattr(layer, "mlp", None) for layer in self.layers)
        modules += [mlp.of_images for mlp in experts if isinstance(mlp, ModalExperts)]
        return modules + _own_modules(self.vision)

    def parts_of_sounds(self) -> list[nn.Module]:
        """Modules that only sounds reach: the encoder and the projector."""
        return _own_modules(self.audio)

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that only images or sounds reach."""
        parts = [*self.parts_of_images(), *self.parts_of_sounds()]
        yield from {id(p): p for module in parts for p in module.parameters()}.values()


def _own_modules(part: Any) -> list[nn.Module]:
    """An encoder and its projector, of which text reaches all but a norm if it has a vocabulary."""
    if part is None:
        return []
    return [part.encoder, *([part.projector.norm_of_features] if embeds_ids(part) else part.ways_out())]
