"""The parts that models are made of. The names below can be used alone, in anybody's model."""

from liger_models.layers.activations import LigerReLUSquared, LigerSoftmax
from liger_models.layers.attention.rotary import liger_rotary_pos_emb
from liger_models.layers.losses import (
    LigerCrossEntropyLoss,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerJSDLoss,
    LigerKLDivLoss,
    LigerTVDLoss,
)
from liger_models.layers.mlp import LigerGEGLUMLP, LigerReLUSquaredMLP, LigerSwiGLUMLP
from liger_models.layers.norm import LigerLayerNorm, LigerRMSNorm

__all__ = [
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKLDivLoss",
    "LigerGEGLUMLP",
    "LigerJSDLoss",
    "LigerKLDivLoss",
    "LigerLayerNorm",
    "LigerRMSNorm",
    "LigerReLUSquared",
    "LigerReLUSquaredMLP",
    "LigerSoftmax",
    "LigerSwiGLUMLP",
    "LigerTVDLoss",
    "liger_rotary_pos_emb",
]
