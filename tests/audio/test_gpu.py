"""On a GPU: models with audio encoders in bfloat16 at published widths are as accurate as the reference."""

from __future__ import annotations

import pytest
import torch
from scenes import VisionPair
from wide import batches_of, emptied, exact_float32, farther_than_reference, wide_config  # noqa: F401  (fixtures)

from liger_models.images.sounds import Sound

pytestmark = pytest.mark.gpu


FAMILIES = (
    *("gemma3n", "gemma4", "glmasr", "granite_speech", "musicflamingo", "phi4_multimodal"),
    *("qwen2_audio", "qwen3_asr"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_at_real_widths_is_as_accurate_as_the_reference(family, emptied):  # noqa: F811
    """Compare logits, loss and every gradient of encoder, projector and language model."""

    def batches(pair):
        torch.manual_seed(0)
        documents = [[60, Sound(123), 100, Sound(40), 30], [Sound(300), 90]]
        count = batches_of(pair.ours.spec)
        rows = [pair.rows_of_one_length(documents, near_ties=True) for _ in range(count)]
        # Of the ids that only an encoder's table has there would be one or two, whose gradients are noise.
        first = config.get("vision_config", {}).get("vocab_offset", pair.vocab_size)
        for row in rows:
            row["input_ids"].clamp_(max=first - 1)
        return rows

    config = wide_config(family, having="audio_config")
    text = config.get("text_config", {})
    if text.get("num_kv_shared_layers") and text["num_hidden_layers"] > 8:
        # The rounding of all layers leaves gradients little but noise: fewer, the last two with shared keys.
        kinds = [*text["layer_types"][:6], "sliding_attention", "full_attention"]
        fewer = {"layer_types": kinds, "num_hidden_layers": len(kinds), "num_kv_shared_layers": 2}
        config["text_config"] = text | fewer
    assert not farther_than_reference(family, config, batches, VisionPair)
