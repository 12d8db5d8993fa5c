"""Audio inputs: processor outputs, and encoders of spectrograms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from liger_models.layers.specs.block import BlockSpec
from liger_models.layers.specs.mlp import Activation
from liger_models.layers.specs.norms import LayerNormSpec, NormSpec
from liger_models.layers.specs.projectors import ProjectorSpec


@dataclass(frozen=True)
class PaddedSounds:
    """Processor outputs `input_features` [clips, bins, 2 * frames], spectrograms padded to one length. With
    `masked` comes `mask` [clips, 2 * frames], 0 for padding, which then makes no tokens and is not attended
    to, unless it is `attended` (GLM-ASR). Positions are a stored table of as many `frames`, which is not
    trained (Whisper, arXiv:2212.04356), or the layers' rotary ones.
    """

    frames: int
    masked: bool = False
    mask: str = "feature_attention_mask"
    attended: bool = False
    features: ClassVar[str] = "input_features"
    columns_first: ClassVar[bool] = False


@dataclass(frozen=True)
class ChunkedSounds:
    """The same for clips of any length, `input_features` [clips, bins, columns] and `mask` [clips, columns].
    A clip is cut into chunks of `chunk` columns, which are convolved one by one and whose frames attend to
    those of up to `window` chunks together, counted from the clip's beginning. Positions within a chunk are
    sines and cosines, which are not stored (Qwen2.5-Omni, arXiv:2503.20215, section 2.2). If `filled`, the
    processor pads clips to whole chunks, which are convolved with this padding as it is (Qwen3-ASR).
    """

    chunk: int
    window: int = 1
    filled: bool = False
    mask: str = "feature_attention_mask"
    masked: ClassVar[bool] = True
    features: ClassVar[str] = "input_features"
    columns_first: ClassVar[bool] = False


@dataclass(frozen=True)
class WaveformSounds:
    """Processor outputs `input_features` [clips, pieces, samples], waveforms cut into pieces and padded to as
    many, and `input_features_mask` [clips, pieces], False for padding. There is no encoder: pieces are the
    projector's input (Gemma 4 12B).
    """

    masked: ClassVar[bool] = True
    features: ClassVar[str] = "input_features"
    mask: ClassVar[str] = "input_features_mask"
    columns_first: ClassVar[bool] = True


@dataclass(frozen=True)
class SubsampledSounds:
    """Processor outputs `input_features` [clips, columns, bins], spectrograms of any length padded to the
    longest, and `input_features_mask` [clips, columns], False for padding. Convolutions over three columns
    and three frequencies, with stride 2 and without biases, make so many `channels`. A LayerNorm over
    channels, with `eps` and without a bias, and max(x, 0) follow each (USM, arXiv:2303.01037). If
    `cumulative`, it is a norm by the mean and variance of all columns so far instead (Gemma 3n):
    convolutions then begin with their column and read the padding that the processor made.
    """

    channels: tuple[int, ...]
    eps: float = 1e-6
    cumulative: bool = False
    masked: ClassVar[bool] = True
    features: ClassVar[str] = "input_features"
    mask: ClassVar[str] = "input_features_mask"
    columns_first: ClassVar[bool] = True


@dataclass(frozen=True)
class CountedSounds:
    """Processor outputs `audio_input_features` [clips, columns, bins], spectrograms of any length padded to
    the longest, `audio_embed_sizes` [clips], the number of tokens of each, and `audio_attention_mask` [clips,
    columns], False for padding, which may be missing if there is none. Spectrograms are normalised by a
    stored mean and scale of each frequency. Convolutions over three columns and three frequencies, with
    stride 2 and biases, make so many `channels`; all but the first have one window for each channel, and
    mix channels afterwards. `activation` follows each. Up to `piece` frames attend to one another; frames of
    zeros fill up the last piece of longer clips, and are attended to (Phi-4-multimodal, arXiv:2503.01743,
    section 2.1.2).
    """

    channels: tuple[int, ...]
    piece: int
    activation: Activation = "relu"
    masked: ClassVar[bool] = True
    features: ClassVar[str] = "audio_input_features"
    mask: ClassVar[str] = "audio_attention_mask"
    sizes: ClassVar[str] = "audio_embed_sizes"
    columns_first: ClassVar[bool] = True


@dataclass(frozen=True)
class DepthwiseSounds:
    """Processor outputs `input_features` [clips, columns, bins], spectrograms of any length padded with zeros
    to one column more than the longest, and `input_features_mask` [clips, columns], False for padding.
    Convolutions over three columns and three frequencies, with stride 2 and biases, make so many `channels`;
    all but the first have one window for each channel, and mix channels afterwards. max(x, 0) follows each.
    Frames are multiplied by `scale`. A clip has as many tokens as with one column of padding. If this column
    makes one more frame, the frame attends to all frames of the clip alike, and no other frame sees it
    (Parakeet; FastConformer, arXiv:2305.05084, section 3.1).
    """

    channels: tuple[int, ...]
    scale: float = 1.0
    activation: ClassVar[Activation] = "relu"
    masked: ClassVar[bool] = True
    features: ClassVar[str] = "input_features"
    mask: ClassVar[str] = "input_features_mask"
    columns_first: ClassVar[bool] = True


@dataclass(frozen=True)
class StackedSounds:
    """Processor outputs `input_features` [clips, columns, bins], two columns of a spectrogram side by side in
    each, padded to the longest, and `input_features_mask` [clips, tokens], False where a clip has no token.
    A linear layer with a bias makes a frame of each column. The number of tokens tells the projector's
    windows of a clip, and not where within the last one the clip ends: padding is encoded as if it were part
    of the clip, as in the reference (Granite Speech, arXiv:2505.08699, section 2).
    """

    channels: ClassVar[tuple[int, ...]] = ()
    masked: ClassVar[bool] = True
    features: ClassVar[str] = "input_features"
    mask: ClassVar[str] = "input_features_mask"
    columns_first: ClassVar[bool] = True


ConformerSounds = SubsampledSounds | CountedSounds | DepthwiseSounds | StackedSounds
"""Sounds whose encoder is a conformer."""


@dataclass(frozen=True)
class TimeRotarySpec:
    """Rotation of `dim` pairs of a feature's dimensions by the time since its recording began, with columns
    of `step` seconds: layers/audio/time_rotary.py.
    """

    dim: int
    theta: float
    step: float


@dataclass(frozen=True)
class AudioSpec:
    """An audio encoder and its projector into a language model.

    Spectrograms of `bins` frequencies pass through two convolutions of three columns, the second with stride
    2, which make frames of width `hidden_size`; or, with `channels`, through three convolutions of three
    columns and three frequencies to so many channels, all with stride 2, and one linear layer (Qwen3-Omni).
    `blocks` are the encoder's; a frame sees its own clip. If `paired`, two frames each are averaged, and the
    last of an odd number is left out. After `norm_after` the `projector` turns frames into features, one for
    each token with the id `audio_id`. `sounds` is the form of the processor's output. Pieces of waveforms
    have `bins` samples, and no encoder. For `ConformerSounds` the blocks are a conformer's. A linear layer
    with a bias turns their output into `output_size` numbers, if that is given.
    The blocks share a table of biases by distance, one for each head and up to `distances` frames before and
    after. In a document with tokens `image_id` the second of the projector's two ways is taken. Every
    `reduction`th frame of a clip is the projector's input. If `tokens` is given, each clip has as many: after
    its features, the one that the projector makes of its `padding_row` follows, as often as needed. With
    `characters`, the softmax of so many scores of the middle layer's output is projected and added to it
    (self-conditioned CTC, arXiv:2104.02724, section 3). `states` are further inputs of the projector, before
    the last layer's output: 0 is the input of the first layer, i the output of layer i. If
    `adapts_language`, transformers' `generate` switches adapters loaded into the model on for calls with
    sounds, and off for others. With `times` the projector's input is rotated by the time since the beginning
    of a recording, whose clips are those whose tokens follow one another.
    """

    hidden_size: int
    bins: int
    blocks: tuple[BlockSpec, ...]
    projector: ProjectorSpec
    audio_id: int
    sounds: PaddedSounds | ChunkedSounds | WaveformSounds | ConformerSounds
    norm_after: NormSpec | LayerNormSpec | None = None
    paired: bool = False
    channels: int | None = None
    output_size: int | None = None
    distances: int | None = None
    image_id: int | None = None
    reduction: int = 1
    tokens: int | None = None
    characters: int | None = None
    states: tuple[int, ...] = ()
    adapts_language: bool = False
    times: TimeRotarySpec | None = None

    @property
    def features_size(self) -> int:
        """Width of the projector's input."""
        width = self.hidden_size if self.output_size is None else self.output_size
        return width * (len(self.states) + 1)
