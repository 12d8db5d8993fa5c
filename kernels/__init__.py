"""Triton operations, each with its plain PyTorch twin.

May import torch and triton, and no other part of the package. Subpackages import the modules of this
folder, and one another where they fuse operations.
"""

from liger_models.kernels.activations.gated import (
    CappedSwiGLU,
    ClampedSwiGLU,
    capped_swiglu,
    clamped_swiglu,
    geglu,
    relu2,
    relu2_gated,
    sigmoid_gated,
    swiglu,
)
from liger_models.kernels.activations.softmax import softmax
from liger_models.kernels.activations.sparse_gated import sparse_gated
from liger_models.kernels.activations.xielu import xielu
from liger_models.kernels.attention.chosen_blocks import ChosenBlocks, choose_blocks
from liger_models.kernels.attention.chosen_keys import choose_keys
from liger_models.kernels.attention.flash_attention import attention
from liger_models.kernels.attention.indexer_loss import indexer_loss
from liger_models.kernels.attention.visible_keys import (
    KeyRanges,
    document_bounds,
    key_ranges,
    marked_spans,
    tree_ranges,
)
from liger_models.kernels.embeddings import embedding
from liger_models.kernels.experts._expert_operands import StoredMatrices
from liger_models.kernels.experts._expert_paths import ExpertPath
from liger_models.kernels.experts.moe_experts import moe_experts
from liger_models.kernels.experts.moe_routing import route
from liger_models.kernels.experts.router_losses import load_balancing_loss, router_z_loss
from liger_models.kernels.float8.product import float8_product, has_float8_products
from liger_models.kernels.float8.quantize import Float8, quantize
from liger_models.kernels.losses.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_models.kernels.losses.divergence import generalized_jsd, kl_div, total_variation
from liger_models.kernels.losses.linear_cross_entropy import linear_cross_entropy
from liger_models.kernels.losses.linear_divergence import linear_cosine_distillation, linear_jsd, linear_kl
from liger_models.kernels.losses.linear_log_probs import linear_log_probs
from liger_models.kernels.losses.log_probs import TokenScores, log_probs
from liger_models.kernels.norms.gated_rms_norm import gated_rms_norm
from liger_models.kernels.norms.layer_norm import add_layer_norm, layer_norm
from liger_models.kernels.norms.rms_norm import add_rms_norm, rms_norm
from liger_models.kernels.optimizer.adamw import AdamWSettings, AdamWTensors, adamw
from liger_models.kernels.optimizer.sum_of_squares import sum_of_squares
from liger_models.kernels.quantised.decode_codes import decode_codes
from liger_models.kernels.quantised.ternary import round_inputs, round_weights, weight_scales
from liger_models.kernels.recurrent.channel_delta_rule import (
    channel_delta_rule,
    channel_delta_rule_step,
)
from liger_models.kernels.recurrent.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from liger_models.kernels.recurrent.rg_lru import rg_lru, rg_lru_step
from liger_models.kernels.recurrent.short_conv import (
    conv_state,
    gated_short_conv,
    short_conv,
    short_conv_step,
)
from liger_models.kernels.recurrent.state_spaces.selective_scan import selective_scan, selective_scan_step
from liger_models.kernels.recurrent.state_spaces.ssd import ssd, ssd_step
from liger_models.kernels.rotary.qk_norm_rotary import split_norm_rotary_qkv
from liger_models.kernels.rotary.rotary import multi_axis_tables, rotary, split_rotary_qkv

__all__ = [
    "AdamWSettings",
    "AdamWTensors",
    "CappedSwiGLU",
    "ChosenBlocks",
    "ClampedSwiGLU",
    "CrossEntropyOutput",
    "ExpertPath",
    "Float8",
    "KeyRanges",
    "StoredMatrices",
    "TokenScores",
    "adamw",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "capped_swiglu",
    "channel_delta_rule",
    "channel_delta_rule_step",
    "choose_blocks",
    "choose_keys",
    "clamped_swiglu",
    "conv_state",
    "cross_entropy",
    "decode_codes",
    "document_bounds",
    "embedding",
    "float8_product",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gated_rms_norm",
    "gated_short_conv",
    "geglu",
    "generalized_jsd",
    "has_float8_products",
    "indexer_loss",
    "key_ranges",
    "kl_div",
    "layer_norm",
    "linear_cosine_distillation",
    "linear_cross_entropy",
    "linear_jsd",
    "linear_kl",
    "linear_log_probs",
    "load_balancing_loss",
    "log_probs",
    "marked_spans",
    "moe_experts",
    "multi_axis_tables",
    "quantize",
    "relu2",
    "relu2_gated",
    "rg_lru",
    "rg_lru_step",
    "rms_norm",
    "rotary",
    "round_inputs",
    "round_weights",
    "route",
    "router_z_loss",
    "selective_scan",
    "selective_scan_step",
    "short_conv",
    "short_conv_step",
    "sigmoid_gated",
    "softmax",
    "sparse_gated",
    "split_norm_rotary_qkv",
    "split_rotary_qkv",
    "ssd",
    "ssd_step",
    "sum_of_squares",
    "swiglu",
    "total_variation",
    "tree_ranges",
    "weight_scales",
    "xielu",
]
