"""Granite Speech (Saon et al., 2025, arXiv:2505.08699): Granite with a conformer for sounds; a Q-Former makes
three tokens of fifteen frames, 300 ms.

Granite Speech Plus (IBM, 2026): its Q-Former also reads outputs of earlier layers of the conformer.
"""

import copy
from dataclasses import replace

from liger_models.architectures.audio_encoders import granite_speech as sounds
from liger_models.architectures.common.images import language_model
from liger_models.architectures.granite import MULTIPLIERS
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec

UNREAD = {"has_lora_adapter": "the adapter has files of its own, next to the weights"}


@register(
    "granite_speech",
    reference="GraniteSpeechForConditionalGeneration",
    audio=True,
    layouts=sounds.layouts(),
    unread=UNREAD,
)
def granite_speech(c: HFConfig) -> ModelSpec:
    return replace(language_model(c), audio=sounds.audio(c))


@register(
    "granite_speech_plus",
    reference="GraniteSpeechPlusForConditionalGeneration",
    audio=True,
    layouts=sounds.layouts(),
    unread=UNREAD,
)
def granite_speech_plus(c: HFConfig) -> ModelSpec:
    return replace(language_model(c), audio=sounds.audio(c, joins=True))


# -- tests

TEXT = {"model_type": "granite", **MULTIPLIERS}
PLUS = copy.deepcopy(sounds.TINY)
PLUS["encoder_config"] |= {"model_type": "granite_speech_plus_encoder", "cat_hidden_layers": [1, 0]}
PLUS["projector_config"] |= {"encoder_hidden_size": 72}
VARIANTS = {
    "two layers between": {
        "projector_config": {
            **sounds.TINY["projector_config"],
            "num_hidden_layers": 3,
            "cross_attention_frequency": 2,
        }
    }
}
SKIP = {
    "field:AudioSpec.adapts_language": "of adapters, see tests/audio/test_granite_speech.py",
    "field:FrameQueriesSpec.frequency": "of more layers than one without: the variant has these",
}
for_tests("granite_speech", tiny={"text_config": TEXT, **sounds.TINY}, variants=VARIANTS, skip=SKIP)
for_tests("granite_speech_plus", tiny={"text_config": {**TEXT}, **PLUS}, skip=SKIP)
