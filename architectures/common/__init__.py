"""Readers of config keys that many families share, from rotary settings to whole decoders.

May import the registry, the specs and the conversion package; the families import it.
"""

from liger_models.architectures.common.grouped_attention import (
    alibi_slopes,
    attention,
    attention_as_wide_as_the_model,
    check_groups,
    chunks,
    layer_sizes,
    share_keys,
    unread_keys,
    windows,
)
from liger_models.architectures.common.linear_attention import LINEAR, gated_delta, mixers
from liger_models.architectures.common.mlps import (
    INPUTS_FIRST,
    activation,
    aux_loss_coef,
    chosen_experts,
    expert_layouts,
    experts_and_chosen,
    mlp,
)
from liger_models.architectures.common.model import (
    CHUNKED,
    FULL,
    SLIDING,
    by_layer,
    decoder,
    layer_types,
    padding_row,
)
from liger_models.architectures.common.rotary import (
    GROWING_QUERIES,
    local_rope,
    longrope_alone,
    query_scale,
    rope,
    turning_layers,
)
from liger_models.architectures.common.selective import selective
from liger_models.architectures.common.state_space import hybrid_types, part_types, ssd, time_step_limit

__all__ = [
    "CHUNKED",
    "FULL",
    "GROWING_QUERIES",
    "INPUTS_FIRST",
    "LINEAR",
    "SLIDING",
    "activation",
    "alibi_slopes",
    "attention",
    "attention_as_wide_as_the_model",
    "aux_loss_coef",
    "by_layer",
    "check_groups",
    "chosen_experts",
    "chunks",
    "decoder",
    "expert_layouts",
    "experts_and_chosen",
    "gated_delta",
    "hybrid_types",
    "layer_sizes",
    "layer_types",
    "local_rope",
    "longrope_alone",
    "mixers",
    "mlp",
    "padding_row",
    "part_types",
    "query_scale",
    "rope",
    "selective",
    "share_keys",
    "ssd",
    "time_step_limit",
    "turning_layers",
    "unread_keys",
    "windows",
]
