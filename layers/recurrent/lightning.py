"""Lightning attention: MiniMax-Text-01 (MiniMax, 2025, arXiv:2501.08313, section 2.2).

    q, k, v = act(x @ W_qkv^T);   S <- exp(-s) S + k v^T;   o = q S
    out = (sigmoid(x @ W_g^T) * norm(o)) @ W_o^T

Each head has a fixed decay s. It is the scan of Mamba 2 with steps of one
(kernels/recurrent/state_spaces/ssd.py), whose state is S^T. It restarts at every document. q, k and v of a
head are adjacent rows of W_qkv.

Between the projections and the norm, `lean` keeps q, k, v before the activation, the gate and o. The
activation runs again in the backward pass. The states of chunks are never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels import ssd, ssd_step
from liger_models.kernels._constants import cached_tensors
from liger_models.kernels.recurrent._chunk_table import SEGMENT, ChunkTables
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.parts.mlp import plain_activation
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipes
from liger_models.layers.recurrent.gated_norm import GatedNormalisation
from liger_models.layers.recurrent.mixer import RecurrentMixer
from liger_models.layers.recurrent.short_conv import WHOLE, Share
from liger_models.layers.recurrent.ssd import scan_bytes
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import Activation, LightningSpec

STEP = (1.0, 1.0)
"""Bounds of the step, which is one."""


class LightningAttention(RecurrentMixer):
    """Lightning attention over packed documents.

    Args:
        hidden_size: the width H of the hidden states.
        spec: heads, their decays, and the norm.
        layer: the index of this layer in the model, and in a cache.
        backend: of attention; ignored here.
    """

    transfers = "factors"

    def __init__(
        self, hidden_size: int, spec: LightningSpec, layer: int = 0, backend: AttentionBackend = "auto"
    ):
        super().__init__(layer)
        self.spec = spec
        self.qkv_proj = Linear(hidden_size, spec.conv_size, bias=False)
        self.output_gate = Linear(hidden_size, spec.size, bias=False)
        self.conv1d = ActivationOfHeads(spec.activation, spec.heads, 3 * spec.head_dim)
        self.norm = GatedNormalisation(spec.size, spec.norm_eps, activation="sigmoid")
        self.out_proj = Linear(spec.size, hidden_size, bias=False)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [T, H] -> [T, H]."""
        o = self.mix(self.qkv_proj(x), (), sequences)
        return self.out_proj(self.norm(o.flatten(1), self.output_gate(x)))

    def scan(
        self,
        parts: tuple[Tensor, ...],
        gates: Sequence[Tensor],
        documents: Tensor | None,
        state: Tensor | None,
        share: Share = WHOLE,
        tables: ChunkTables | None = None,
    ) -> tuple[Tensor, Tensor]:
        (q, k, v), (decay, zeros) = parts, self._by_head(parts[0], share)
        steps = zeros.expand(len(v), -1)
        options: dict[str, Any] = {"cu_seqlens": documents, "state": state, "tables": tables}
        return ssd(v, steps, k, q, decay, zeros, zeros, dt_limit=STEP, **options)

    def step(
        self, parts: tuple[Tensor, ...], gates: Sequence[Tensor], state: Tensor
    ) -> tuple[Tensor, Tensor]:
        (q, k, v), (decay, zeros) = parts, self._by_head(parts[0], WHOLE)
        return ssd_step(v, zeros.expand(len(v), -1), k, q, decay, zeros, zeros, state, dt_limit=STEP)

    def _by_head(self, like: Tensor, share: Share) -> tuple[Tensor, ...]:
        """The logarithm of this share's decays, and as many zeros, on a tensor's device."""
        wide = torch.promote_types(like.dtype, torch.float32)
        return self.own_share(share, *_log_decays(self.spec.decays, like.device, wide))

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.spec.heads, self.spec.head_dim, self.spec.head_dim

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token on a GPU: q, k and v before the activation, the gate and o; with `all` also q,
        k and v after it and the norm's output; and in float32 the states between segments.
        """
        spec = self.spec
        kept = spec.conv_size + 2 * spec.size
        states = 4 * spec.size * spec.head_dim // SEGMENT
        return itemsize * (kept + (spec.conv_size + spec.size if level == "all" else 0)) + states

    def backward_bytes(self, itemsize: int) -> int:
        """Peak bytes per token during the backward pass of the scan on a GPU: `SSD.backward_bytes`, and the
        gradients of q, k and v in one tensor.
        """
        spec = self.spec
        of_scan = scan_bytes(spec.size, spec.conv_size, spec.heads, spec.heads, spec.head_dim, itemsize)
        return of_scan + itemsize * spec.conv_size

    def extra_repr(self) -> str:
        return f"heads={self.spec.heads}, head_dim={self.spec.head_dim}"


class ActivationOfHeads(nn.Module):
    """An activation of `heads` heads with `width` channels each: queries, keys and values. It takes the place
    of a `ShortConvolution`, whose interface it has, and has one tap.
    """

    taps = 1

    def __init__(self, activation: Activation, heads: int, width: int):
        super().__init__()
        self.heads, self.channels = ((heads, width),), heads * width
        self.activation = plain_activation(activation)

    def forward(
        self,
        x: Tensor,
        documents: Tensor | None,
        bounds: Tensor | None,
        state: Tensor | None = None,
        share: Share = WHOLE,
        before: int = 0,
    ) -> tuple[Tensor, ...]:
        """x [T, C] -> three parts [T, heads, width / 3]; with `share`, x has that share of the heads."""
        return carry_recipes(self._parts(x), self._parts, x, deep=True)

    def step(self, x: Tensor, state: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """x [batch, C], state [batch, 0, C] -> three parts [batch, heads, width / 3], and the same state."""
        return self._parts(x), state

    def next_state(self, x: Tensor, documents: Tensor | None, state: Tensor | None) -> Tensor:
        """Return [documents, 0, C]: no inputs are needed again."""
        return x.new_zeros(1 if documents is None else len(documents) - 1, 0, x.shape[1])

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        by_head = self.activation(x).unflatten(-1, (-1, 3, self.heads[0][1] // 3))
        # The scan would copy rows with gaps between heads, and keep the copies.
        return by_head.permute(2, 0, 1, 3).contiguous().unbind(0)


@cached_tensors()
def _log_decays(decays: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logarithms, and as many zeros."""
    made = torch.tensor(decays, dtype=torch.float64, device="cpu").log().to(device, dtype)
    return made, torch.zeros_like(made)
