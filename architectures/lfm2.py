"""LFM2 (Liquid AI, 2025, arXiv:2511.23404): gated short convolutions in most layers, and attention with
QK-norm in the others.
"""

from liger_models.architectures.common import decoder, liquid
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, NormSpec


def inner_width(c: HFConfig) -> int:
    """Width of the MLPs: two thirds of `intermediate_size`, multiplied and rounded up, unless that is
    switched off.
    """
    width = c.take_count("block_ff_dim", c.take_count("intermediate_size"))
    multiplier = c.take_number("block_ffn_dim_multiplier", 1.0, positive=True)
    multiple = c.take_count("block_multiple_of", 256)
    if not c.take_flag("block_auto_adjust_ff_dim", True):
        return width
    return multiple * -(-int(multiplier * int(2 * width / 3)) // multiple)


INITIALISATION = (
    "block_mlp_init_scale",
    "block_out_init_scale",
    "block_use_xavier_init",
    "conv_use_xavier_init",
)
OTHER_NAMES = ("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads")
UNREAD = {
    **dict.fromkeys(INITIALISATION, "read only by initialisation"),
    **dict.fromkeys(OTHER_NAMES, "repeats another key, which is read"),
}


@register(
    "lfm2",
    reference="Lfm2ForCausalLM",
    layouts=(Layout((*liquid.NAMES, *liquid.EXPERTS, *liquid.PRE_NORM, *liquid.ATTENTION)),),
    defaults={**liquid.DEFAULTS, "intermediate_size": 12288},
    fixed={"block_use_swiglu": True, "use_pos_enc": True},
    unread=UNREAD,
)
def lfm2(c: HFConfig) -> ModelSpec:
    norm, mlp = NormSpec(eps=c.take_number("norm_eps", 1e-5)), MLPSpec(inner_width(c))
    full = c.take_layers("full_attn_idxs", list(range(c.take_count("num_hidden_layers"))))
    blocks = [BlockSpec(mixer, mlp, norm) for mixer in liquid.mixers(c, norm, full)]
    return liquid.tied(c, decoder(c, blocks, norm))


# -- tests

for_tests(
    "lfm2",
    tiny={
        **liquid.TINY,
        "intermediate_size": 90,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.2,
        "block_multiple_of": 16,
    },
    variants={
        "attention by number": {"layer_types": ..., "full_attn_idxs": [1]},
        "older names": {"block_ff_dim": 120, "tie_embedding": True},
    },
)
