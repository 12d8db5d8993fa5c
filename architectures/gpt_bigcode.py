"""GPT-BigCode, StarCoder and SantaCoder (Li et al., 2023, arXiv:2305.06161; 2301.03988): GPT-2 with one
key/value head for all queries.
"""

from liger_models.architectures.gpt2 import (
    DEFAULTS,
    MASKS,
    SKIP,
    TINY,
    VARIANTS,
    layouts,
    with_learned_positions,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec

IN_FLOAT32 = ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")


@register(
    "gpt_bigcode",
    reference="GPTBigCodeForCausalLM",
    layouts=layouts()[1:],
    carried=lambda c: MASKS,
    defaults={**DEFAULTS, "activation_function": "gelu_pytorch_tanh"},
    fixed={"multi_query": True, "num_key_value_heads": 1},
    unread=dict.fromkeys(IN_FLOAT32, "scores are in float32"),
)
def gpt_bigcode(c: HFConfig) -> ModelSpec:
    return with_learned_positions(c, kv_heads=1)


# -- tests

for_tests("gpt_bigcode", tiny=TINY, variants=VARIANTS, skip=SKIP)
