"""The parts that models are made of. The names below can be used alone, in anybody's model."""

from liger_models.layers.losses import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from liger_models.layers.mlp import LigerGEGLUMLP, LigerSwiGLUMLP
from liger_models.layers.norm import LigerLayerNorm, LigerRMSNorm
from liger_models.layers.rotary import liger_rotary_pos_emb

__all__ = [
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerGEGLUMLP",
    "LigerLayerNorm",
    "LigerRMSNorm",
    "LigerSwiGLUMLP",
    "liger_rotary_pos_emb",
]
