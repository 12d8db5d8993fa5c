"""Attention to the keys and values of an earlier layer (Brandon et al., 2024, arXiv:2405.12981).

    q = rotate(norm(x @ W_q^T + b));   out = attend(q, k, v) @ W_o^T + b          k, v: of layer `keys_of`

Generation caches nothing here: keys and values come from the cache of the earlier layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models.kernels import rotary
from liger_models.layers.attention.backends import AttentionBackend, attend
from liger_models.layers.attention.cached import attend_cached
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import SharedAttentionSpec


class SharedAttention(nn.Module):
    """Causal attention over packed documents, to given keys and values.

    Args:
        hidden_size: the width H of the hidden states.
        spec: heads, rotary settings, window, bias, and the layer of the keys.
        layer: the index of this layer in the model.
        backend: see layers/attention/backends.py.
    """

    def __init__(
        self, hidden_size: int, spec: SharedAttentionSpec, layer: int = 0, backend: AttentionBackend = "auto"
    ):
        super().__init__()
        self.spec, self.layer, self.backend = spec, layer, backend
        self.q_proj = Linear(hidden_size, spec.q_size, bias=spec.bias)
        self.o_proj = Linear(spec.q_size, hidden_size, bias=spec.bias)
        self.q_norm = None if spec.q_norm is None else make_norm(spec.head_dim, spec.q_norm)

    def forward(self, x: Tensor, sequences: Sequences, keys: Tensor, values: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. `keys` and `values` as `Attention` returns them."""
        sequences = sequences.on(x.device)
        spec, cache = self.spec, sequences.cache
        q = self.q_proj(x).unflatten(-1, (-1, spec.head_dim))
        if self.q_norm is not None:
            q = self.q_norm(q).to(x.dtype)
        if spec.rope is not None:
            q = rotary(q, q[:, :0], *sequences.positions.rotary[spec.rope], spec.rope.interleaved)[0]
        mask = None if cache is None else cache.mask(spec.keys_of, spec.window)
        if mask is None:
            out = attend(q, keys, values, spec.attention, sequences, self.backend)
        else:
            out = attend_cached(q, keys, values, spec.attention, mask)
        return self.o_proj(out.flatten(1))

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Nothing."""
        return ()

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token on a GPU: q, the output, and in float32 the log-sum-exp of each head; for a
        norm of queries its input and statistics. The layer that made keys and values keeps them.
        """
        spec = self.spec
        normed = 0 if self.q_norm is None else itemsize * spec.q_size + 4 * spec.num_attention_heads
        return 2 * itemsize * spec.q_size + 4 * spec.num_attention_heads + normed

    def extra_repr(self) -> str:
        spec = self.spec
        window = "" if spec.window is None else f", window={spec.window}"
        return f"heads={spec.num_attention_heads}, head_dim={spec.head_dim}{window}, keys_of={spec.keys_of}"
