"""Qwen3-VL with experts (Bai et al., 2025, arXiv:2511.21631): Qwen3 with experts, with the encoder of
Qwen3-VL.
"""

from collections.abc import Mapping
from dataclasses import replace

from liger_models.architectures.common import INPUTS_FIRST
from liger_models.architectures.encoders.qwen import TINY_3
from liger_models.architectures.qwen3_vl import LAYOUT, SKIP, TINY, TINY_ROPE, qwen3_vl
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import ModelSpec


@register(
    "qwen3_vl_moe",
    reference="Qwen3VLMoeForConditionalGeneration",
    vision=True,
    layouts=(LAYOUT, replace(LAYOUT, permuted=INPUTS_FIRST)),
)
def qwen3_vl_moe(c: HFConfig) -> ModelSpec:
    text = c.raw.get("text_config")
    if isinstance(text, Mapping) and not {"num_experts", "num_local_experts"} & text.keys():
        raise ConfigError(f"{c.name}: text_config has no num_experts; take it from the original")
    return qwen3_vl(c)


# -- tests

for_tests(
    "qwen3_vl_moe",
    tiny={
        "text_config": {
            "model_type": "qwen3_vl_moe_text",
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.5,
            "mlp_only_layers": [0],
            "rope_parameters": TINY_ROPE,
        },
        "vision_config": {"model_type": "qwen3_vl_moe", **TINY_3},
        **TINY,
    },
    skip=SKIP,
)
