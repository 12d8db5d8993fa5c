"""Attention to convolved keys and values, with learned scores by distance in place of rotary positions
(Inkling, 2026).

    q, kv, r = split(x @ W^T);   k, v = kv + conv(kv);   q, k = norm(q), norm(k), by head
    score(i, j) = scale * q_i k_j + (r_i P)[i - j];      out = softmax(scores) v @ W_o^T

The product is relative_scores.py, the convolution residual_conv.py. Where queries are scaled
by their positions, r is, too. `lean` keeps the projections, and the scaled queries and r; norms and
convolutions run again in the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models.kernels.invariant.mode import is_batch_invariant
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.attention.fused import biased_attention
from liger_models.layers.attention.query_scale import scale_queries
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear, in_order
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.recurrent.relative_scores import attend_with_distances, biases_by_distance
from liger_models.layers.recurrent.residual_conv import ResidualConvolution
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import ConvolvedAttentionSpec


class ConvolvedAttention(nn.Module):
    """Causal attention over packed documents.

    Args:
        hidden_size: the width H of the hidden states.
        spec: heads, convolution, scores by distance, window.
        layer: the index of this layer in the model, and in a cache.
        backend: unused; torch computes it.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: ConvolvedAttentionSpec,
        layer: int = 0,
        backend: AttentionBackend = "auto",
    ):
        super().__init__()
        self.spec, self.layer = spec, layer
        self.axes = {
            "heads": spec.num_attention_heads,
            "key_value_heads": spec.num_key_value_heads,
            "head_dim": spec.head_dim,
        }
        parts = {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size, "r_proj": spec.r_size}
        self.qkvr_proj = PackedLinear(hidden_size, parts, bias=False)
        heads = (spec.num_key_value_heads, spec.head_dim)
        self.kv_sconv = ResidualConvolution((heads, heads), spec.conv, layer, 0, ("k_sconv", "v_sconv"))
        self.q_norm, self.k_norm = make_norm(spec.head_dim, spec.norm), make_norm(spec.head_dim, spec.norm)
        self.k_norm.remakes_input = True
        self.profiles = nn.Parameter(torch.empty(spec.distance_dim, spec.extent))
        self.o_proj = Linear(spec.q_size, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw the profiles from a normal distribution; projections and norms are modules of their own."""
        nn.init.normal_(self.profiles, 0.0, std, generator)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [T, H] -> [T, H].

        Raises:
            ValueError: within `batch_invariant`, which its products do not support.
        """
        if is_batch_invariant():
            raise ValueError("batch_invariant() does not support attention with scores by distance")
        sequences = sequences.on(x.device)
        spec, cache = self.spec, sequences.cache
        qkvr = in_order(self, "qkvr_proj")(x)
        q, kv, r = qkvr.split([spec.q_size, 2 * spec.kv_size, spec.r_size], dim=-1)
        k, v = self.kv_sconv(kv, sequences)
        q, k = self.q_norm(q.unflatten(-1, (-1, spec.head_dim))), self.k_norm(k)
        r = r.unflatten(-1, (-1, spec.distance_dim))
        q, r = (scale_queries(part, spec.query_scale, sequences) for part in (q, r))
        if cache is not None:
            keys, values = cache.append(self.layer, k, v)
            mask = cache.mask(self.layer, spec.window)
            if mask is not None:
                return self.o_proj(self._to_cached(q, keys, values, r, cache.distances(self.layer), mask))
        settings = spec.scale, spec.window, sequences.documents.host_boundaries()
        return self.o_proj(attend_with_distances(q, k, v, r, self.profiles, *settings).flatten(1))

    def _to_cached(
        self, q: Tensor, keys: Tensor, values: Tensor, r: Tensor, distances: Tensor, mask: Tensor
    ) -> Tensor:
        """Attention of the new tokens [batch * new, heads, dim] to keys and values [batch, extent, ...]."""
        q, r = (part.unflatten(0, (len(mask), -1)).transpose(1, 2) for part in (q, r))
        biases = biases_by_distance(r, self.profiles, distances.to(q.device), mask.to(q.device))
        out = biased_attention(q, keys.transpose(1, 2), values.transpose(1, 2), biases, self.spec.scale)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Allocate keys and values, [batch, max_length, num_key_value_heads, head_dim] each."""
        shape = (batch, max_length, self.spec.num_key_value_heads, self.spec.head_dim)
        return tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in ("keys", "values"))

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token: the projections and the output, statistics of norms in float32, and scaled
        queries and r; with `all` also normalised queries and keys, and what the convolution makes.
        """
        spec = self.spec
        kept = itemsize * (2 * spec.q_size + 2 * spec.kv_size + spec.r_size)
        kept += 4 * (spec.num_attention_heads + spec.num_key_value_heads)
        if spec.query_scale is not None:
            kept += itemsize * (spec.q_size + spec.r_size)
        return kept + (itemsize * (spec.q_size + 3 * spec.kv_size) if level == "all" else 0)

    def extra_repr(self) -> str:
        spec = self.spec
        heads = f"heads={spec.num_attention_heads}/{spec.num_key_value_heads}, head_dim={spec.head_dim}"
        return f"{heads}, extent={spec.extent}" + ("" if spec.window is None else f", window={spec.window}")
