"""Audio encoders: processor outputs, and encoders of spectrograms."""

from __future__ import annotations

from dataclasses import dataclass

from liger_models.layers.specs.block import BlockSpec
from liger_models.layers.specs.norms import LayerNormSpec, NormSpec
from liger_models.layers.specs.projectors import ProjectorSpec


@dataclass(frozen=True)
class PaddedSounds:
    """Processor outputs `input_features` [clips, bins, 2 * frames], spectrograms padded to one length. With
    `masked` come `feature_attention_mask` [clips, 2 * frames], 0 for padding, which then makes no tokens and
    is not attended to. Positions are a stored table of as many `frames`, which is not trained (Whisper,
    arXiv:2212.04356).
    """

    frames: int
    masked: bool = False


@dataclass(frozen=True)
class AudioSpec:
    """An audio encoder and its projector into a language model.

    Spectrograms of `bins` frequencies pass through two convolutions of three columns, the second with stride
    2, which make frames of width `hidden_size`. `blocks` are the encoder's; a frame sees its own clip. If
    `paired`, two frames each are averaged, and the last of an odd number is left out. After `norm_after` the
    `projector` turns frames into features, one for each token with the id `audio_id`. `sounds` is the form of
    the processor's output.
    """

    hidden_size: int
    bins: int
    blocks: tuple[BlockSpec, ...]
    projector: ProjectorSpec
    audio_id: int
    sounds: PaddedSounds
    norm_after: NormSpec | LayerNormSpec
    paired: bool = False
