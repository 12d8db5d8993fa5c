"""VaultGemma (Google, 2025): Gemma 2 without norms after the branches, trained with differential privacy."""

from liger_models.architectures.gemma2 import DEFAULTS, TINY, VARIANTS, capped
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "vaultgemma",
    reference="VaultGemmaForCausalLM",
    layouts=(Layout(rename=((".post_attention_layernorm.", ".pre_feedforward_layernorm."),)),),
    defaults=DEFAULTS,
)
def vaultgemma(c: HFConfig) -> ModelSpec:
    return capped(c, "pre_norm")


# -- tests

for_tests("vaultgemma", tiny=TINY, variants=VARIANTS)
