"""Falcon-Mamba (TII, 2024, arXiv:2410.05355): Mamba with norms of the steps, B and C, without weights."""

from liger_models.architectures.mamba import DEFAULTS, SKIP, STEP_BIAS, TINY, UNREAD, VARIANTS, scans
from liger_models.architectures.mamba2 import NAMES
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "falcon_mamba",
    reference="FalconMambaForCausalLM",
    layouts=(Layout((STEP_BIAS, *NAMES), root="backbone."),),
    defaults=DEFAULTS,
    unread={**UNREAD, "use_falcon_mambapy": UNREAD["use_mambapy"]},
)
def falcon_mamba(c: HFConfig) -> ModelSpec:
    return scans(c, norms="unweighted", norm_eps=c.take_number("mixer_rms_eps", 1e-6))


# -- tests

for_tests("falcon_mamba", tiny={**TINY, "mixer_rms_eps": 1e-2}, variants=VARIANTS, skip=SKIP)
