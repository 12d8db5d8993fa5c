"""nanochat (Karpathy, 2025): norms without weights, also of the embeddings; QK-norm after a rotary embedding
in the other direction; squared ReLU, and soft-capped logits.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, Normal, NormSpec, QKNormSpec


@register(
    "nanochat",
    reference="NanoChatForCausalLM",
    layouts=(Layout(((".mlp.up_proj.", ".mlp.fc1."), (".mlp.down_proj.", ".mlp.fc2."))),),
    defaults={
        "max_position_embeddings": 2048,
        "hidden_act": "relu2",
        "final_logit_softcapping": 15.0,
        "pad_token_id": 1,
    },
)
def nanochat(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), weighted=False)
    attn = attention(c, bias=c.take_flag("attention_bias", False))
    assert attn.rope is not None
    heads = QKNormSpec(replace(norm, weighted=True), scope="unweighted", before_rope=False)
    attn = replace(attn, rope=replace(attn.rope, clockwise=True), qk_norm=heads)
    blocks = [BlockSpec(attn, mlp(c, gated=False), norm)] * c.take_count("num_hidden_layers")
    softcap = c.take_number("final_logit_softcapping", None)
    branch = Normal(c.take_number("initializer_range", 0.02) / (2 * len(blocks)) ** 0.5)
    fresh = (("*.o_proj.weight", branch),)
    return decoder(c, blocks, norm, embed_norm=norm, logit_softcap=softcap, fresh=fresh)


# -- tests

for_tests(
    "nanochat",
    tiny={
        "hidden_act": "relu2",
        "attention_bias": True,
        "final_logit_softcapping": 2.0,
        "rms_norm_eps": 1e-3,
    },
    skip={
        "field:QKNormSpec.before_rope": "a rotation changes no norm",
        "rounding:norms": "the norms have no weights by whose names they are found",
    },
)
