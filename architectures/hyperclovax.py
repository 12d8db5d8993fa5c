"""HyperCLOVA X SEED and THINK (NAVER, 2025, arXiv:2506.22403): LLaMA with multipliers for embeddings, scores,
branches and logits, and norms before and after the branches.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.granite import MULTIPLIERS
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec

AROUND = (
    (".post_attention_layernorm.", ".post_norm1."),
    (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
    (".post_feedforward_layernorm.", ".post_norm2."),
)


@register(
    "hyperclovax",
    reference="HyperCLOVAXForCausalLM",
    layouts=(Layout(AROUND), Layout()),
    defaults={"max_position_embeddings": 2048},
)
def hyperclovax(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attn = attention(c, bias=c.take_flag("attention_bias", False))
    attn = replace(attn, scale=c.take_number("attention_multiplier", attn.scale, positive=True))
    block = BlockSpec(
        attn,
        mlp(c, bias=c.take_flag("mlp_bias", False)),
        norm,
        topology="sandwich" if c.take_flag("use_post_norm", True) else "pre_norm",
        residual_scale=c.take_number("residual_multiplier", 1.0),
    )
    return decoder(
        c,
        [block] * c.take_count("num_hidden_layers"),
        norm,
        input_scale=c.take_number("embedding_multiplier", 1.0),
        logit_scale=c.take_number("logits_scaling", 1.0),
    )


# -- tests

for_tests(
    "hyperclovax",
    tiny={**MULTIPLIERS, "attention_bias": True, "mlp_bias": True, "use_post_norm": True},
    skip={
        "refusal:no_logits": "multiplies the logits",
        **{
            f"null:{key}": "the reference would multiply by it"
            for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        },
    },
)
