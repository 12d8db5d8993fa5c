"""The parts that models are made of. Those listed here can be used alone, in any model.

Imports `parts` and `sequences`; the subpackages do not import this package's names.
"""

from liger_models.layers.parts.activations import LigerReLUSquared, LigerSoftmax
from liger_models.layers.parts.losses import (
    LigerCrossEntropyLoss,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerJSDLoss,
    LigerKLDivLoss,
    LigerTVDLoss,
)
from liger_models.layers.parts.mlp import LigerGEGLUMLP, LigerReLUSquaredMLP, LigerSwiGLUMLP
from liger_models.layers.parts.norm import LigerLayerNorm, LigerRMSNorm
from liger_models.layers.sequences.rotary import liger_rotary_pos_emb

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
