"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al., 2024, arXiv:2404.14219; 2412.08905): LLaMA whose checkpoints pack
the projections as we do; longrope, and in Phi-4-mini partial rotary.
"""

from liger_models.architectures.common import attention, decoder, longrope_alone, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "phi3",
    reference="Phi3ForCausalLM",
    layouts=(Layout(whole=("*.qkv_proj.*", "*.gate_up_proj.*")),),
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32000,
    },
    fixed={"full_attn_mod": 1, "interpolate_factor": 1},  # of Phi-4-mini; the reference reads neither
)
def phi3(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    attn = attention(c, window=c.take_count("sliding_window", None), partial=1.0)
    c.take("original_max_position_embeddings")  # read for longrope, and unused by the others
    longrope_alone(c, attn.rope)
    block = BlockSpec(attn, mlp(c), norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

REFUSED = ("linear", "dynamic", "yarn", "llama3")

UNREAD = (
    *("max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "truncate"),
)


def longrope_factors(pairs: int) -> dict[str, list[float]]:
    """Factors for tests, for heads with this many rotated pairs."""
    return {
        "short_factor": [1.1 + 0.03 * i for i in range(pairs)],
        "long_factor": [2.1 + 0.5 * i for i in range(pairs)],
    }


for_tests(
    "phi3",
    tiny={
        "hidden_size": 64,
        "head_dim": ...,  # the reference's rotary embedding assumes hidden_size / heads
        "original_max_position_embeddings": 64,
        "sliding_window": 7,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            **longrope_factors(6),
        },
    },
    variants={"head_dim": {"head_dim": 24, "rope_parameters": {"partial_rotary_factor": 0.75}}},
    skip={
        "refusal:partial_rotary_factor": "a part of a head may turn",
        "field:RopeSpec.factor": "where it is missing it is the ratio of the two lengths",
        **{f"rope:{kind}": "the reference has only longrope" for kind in REFUSED},
        **{f"field:RopeSpec.{name}": "longrope does not read it" for name in UNREAD},
    },
)
