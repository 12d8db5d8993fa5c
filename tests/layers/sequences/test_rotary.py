"""The rotary tables match transformers, at the settings of published models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from liger_models.architectures.common import rope
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.sequences.rotary import rotary_tables
from liger_models.layers.specs import RopeSpec

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + 0.02 * i for i in range(32)],
    "long_factor": [1.0 + 1.9 * i for i in range(32)],
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

# max_position_embeddings, rope settings
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (4096, {"rope_type": "default", "rope_theta": 1e6}),
    "linear": (16384, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (2048, {"rope_type": "dynamic", "factor": 2.0}),
    "yarn": (131072, YARN),
    "yarn_mscale": (163840, {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8}),
    "yarn_attention_factor": (131072, {**YARN, "attention_factor": 0.8}),
    "yarn_not_truncated": (131072, {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}),
    "longrope": (131072, {**LONGROPE, "factor": 32.0}),
    "longrope_attention_factor": (131072, {**LONGROPE, "factor": 32.0, "attention_factor": 1.3}),
    "llama3": (
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}


@pytest.mark.parametrize("longest", [1000, 5000], ids=["short", "long"])
@pytest.mark.parametrize("name", SETTINGS)
def test_tables_match_the_reference(name, longest):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    limit, settings = SETTINGS[name]
    settings = {"rope_theta": 10000.0, **settings}
    raw = {
        "model_type": "llama",
        "max_position_embeddings": limit,
        "head_dim": 64,
        "rope_parameters": settings,
    }
    positions = torch.tensor([0, 1, 2, 17, 511, longest - 1])
    config = llama.LlamaConfig(hidden_size=256, num_attention_heads=4, **raw)
    embedding = llama.LlamaRotaryEmbedding(config)
    expected = embedding(torch.zeros(1), positions[None])
    found = rotary_tables(rope(HFConfig.load(raw), 64), positions, longest)
    # A product in another order changes a frequency by two units in the last place, 2^-22, and an angle by
    # the same fraction.
    angles = positions[:, None] * embedding.inv_freq
    bound = embedding.attention_scaling * (angles * 2**-22 + 2**-23)
    for table, reference in zip(found, expected, strict=True):
        assert table.dtype == torch.float32
        distance = (table - reference[0, :, :32]).abs()  # the reference has every angle twice
        assert (distance <= bound).all()
        if name in ("default", "linear", "longrope", "llama3"):  # the same products in the same order
            assert not distance.any()


def test_a_rotation_keeps_lengths_and_depends_only_on_distance():
    """The property of rotary embeddings: <R(s) q, R(t) k> is a function of t - s."""
    cos, sin = rotary_tables(RopeSpec(16), torch.arange(40))
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos), rtol=1e-6, atol=0)
    # cos(a - b) = cos a cos b + sin a sin b is the same for all pairs at one distance; float32 angles up to
    # 40 have an error of 2e-6.
    products = cos[3:] * cos[:-3] + sin[3:] * sin[:-3]
    torch.testing.assert_close(products, cos[3].expand_as(products), rtol=0, atol=1e-5)


def test_dynamic_scaling_depends_on_the_longest_position_only_beyond_the_trained_length():
    spec = RopeSpec(8, type="dynamic", factor=2.0, max_position_embeddings=32)
    positions = torch.arange(10)
    within, at, beyond = (rotary_tables(spec, positions, longest)[0] for longest in (10, 32, 48))
    assert torch.equal(within, at)
    assert not torch.equal(at, beyond)
    theta = 10000.0 * (2.0 * 48 / 32 - 1) ** (8 / 6)
    angles = torch.arange(10).double()[:, None] * theta ** (-torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(beyond.double(), angles.cos(), rtol=0, atol=2e-6)


def test_longrope_changes_factors_beyond_the_original_length():
    spec = RopeSpec(
        4,
        type="longrope",
        factor=4.0,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        short_factor=(1.0, 2.0),
        long_factor=(3.0, 5.0),
    )
    scale = math.sqrt(1 + math.log(4) / math.log(16))
    for longest, factors in ((16, (1.0, 2.0)), (17, (3.0, 5.0))):
        cos, _ = rotary_tables(spec, torch.tensor([7]), longest)
        expected = [scale * math.cos(7 / factors[0]), scale * math.cos(7 / factors[1] / 100)]
        torch.testing.assert_close(cos[0], torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RopeSpec(8, type="linear"), "'linear' needs factor"),
        (RopeSpec(8, type="dynamic", factor=2.0, max_position_embeddings=8), "needs the longest position"),
        (
            RopeSpec(8, type="longrope", original_max_position_embeddings=8, short_factor=(1.0,)),
            "needs 4 long and short factors, found 1",
        ),
    ],
)
def test_incomplete_settings_are_refused(spec, message):
    longest = None if "position" in message else 4
    with pytest.raises(ValueError, match=message):
        rotary_tables(spec, torch.arange(4), longest)
