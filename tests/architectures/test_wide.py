"""The GPU comparison uses the reference unchanged: in bfloat16 its rotary frequencies are float32."""

import pytest
import torch
from wide import VOCABULARY, _reference, _spec, wide_config

from liger_models.architectures import find_architecture


@pytest.mark.parametrize("family", ["llama", "llama4"])
def test_the_reference_in_bfloat16_has_rotary_frequencies_in_float32(family):
    pytest.importorskip("transformers")
    architecture = find_architecture(family)
    models = [_reference(architecture, dict(architecture.tiny), dtype, "eager").cpu() for dtype in DTYPES]
    narrow, wide = (dict(model.named_buffers()) for model in models)
    assert narrow.keys() == wide.keys() != set()
    assert all(torch.equal(narrow[name], wide[name]) for name in wide)
    assert {p.dtype for p in models[0].parameters()} == {torch.bfloat16}


DTYPES = (torch.bfloat16, torch.float32)


def test_ids_of_sounds_are_within_the_vocabulary_of_a_model_without_images():
    config = wide_config("qwen2_audio")
    assert config["audio_config"]["encoder_layers"] == 3
    spec = _spec(config)
    assert spec.audio.audio_id < spec.vocab_size == VOCABULARY
