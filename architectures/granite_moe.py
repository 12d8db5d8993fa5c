"""Granite 3 with experts (IBM, 2024): Granite with experts, weighted by a softmax over only the chosen ones;
also PowerMoE, and a variant with a shared expert.
"""

from dataclasses import replace

from liger_models.architectures.common import activation, chosen_experts
from liger_models.architectures.granite import MULTIPLIERS, multiplied
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import MLPSpec, ModelSpec, MoESpec

IN_BLOCKS = (
    (".mlp.shared_expert.gate_up_proj.", ".shared_mlp.input_linear."),
    (".mlp.shared_expert.down_proj.", ".shared_mlp.output_linear."),
    (".mlp.", ".block_sparse_moe."),
)
ON_DISK = (
    *IN_BLOCKS,
    (".experts.gate_up_proj", ".input_linear.weight"),
    (".experts.down_proj", ".output_linear.weight"),
    (".router.", ".router.layer."),
)
WHOLE = ("*.experts.*", "*.shared_expert.gate_up_proj.*")
LAYOUTS = (Layout(ON_DISK, WHOLE), Layout(IN_BLOCKS, WHOLE))


DEFAULTS = {
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
}


@register("granitemoe", reference="GraniteMoeForCausalLM", layouts=LAYOUTS, defaults=DEFAULTS)
def granitemoe(c: HFConfig) -> ModelSpec:
    return multiplied(c, experts(c))


@register("granitemoeshared", reference="GraniteMoeSharedForCausalLM", layouts=LAYOUTS, defaults=DEFAULTS)
def granitemoeshared(c: HFConfig) -> ModelSpec:
    """Granite 3 with experts, one of them shared (IBM, 2025): a shared expert next to the chosen ones."""
    return multiplied(c, with_shared(c, experts(c)))


def with_shared(c: HFConfig, moe: MoESpec, size: int = 0) -> MoESpec:
    """Add the shared expert; `size` is the default of its width."""
    size = c.take_count("shared_intermediate_size", size, least=0)
    return replace(moe, shared_expert=MLPSpec(size, activation(c))) if size else moe


def experts(c: HFConfig) -> MoESpec:
    return chosen_experts(c, ("num_local_experts",), size="intermediate_size", softmax_after_top_k=True)


# -- tests

TINY = {
    "intermediate_size": 32,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.5,
    "attention_bias": True,
    **MULTIPLIERS,
}

SKIP = {
    "field:MoESpec.softmax_after_top_k": "renormalised shares of all are the same function",
    "field:MoESpec.renormalize": "the same",
    **{f"null:{key}": "the reference would multiply by it" for key in MULTIPLIERS},
}

for_tests("granitemoe", tiny=TINY, skip=SKIP)

for_tests("granitemoeshared", tiny={**TINY, "shared_intermediate_size": 40}, skip=SKIP)
