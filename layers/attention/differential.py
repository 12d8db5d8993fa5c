"""Differential attention (Ye et al., 2024, arXiv:2410.05258, section 2.1): the difference of two attentions
to the same values, head by head.

    q, k, v = rotate(split(x @ W_qkv^T + b))
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init
    y = attend(q1, k1, v) - lambda * attend(q2, k2, v)
    out = ((1 - lambda_init) * rms_norm(y)) @ W_o^T + b

The first half of the heads of queries and keys is 1, the second half 2. Values are wide, of two heads each:
pair i holds v_i and v_(i + pairs). Both attentions are one call, in which each pair of values serves a key
head of either half. Each head is normalised, without a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models.kernels import rms_norm, split_rotary_qkv
from liger_models.kernels._dispatch import at_least_float32
from liger_models.layers.attention.backends import AttentionBackend, attend
from liger_models.layers.attention.cached import attend_cached
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.recompute.activation_memory import ActivationMemory, output_is_ours
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import DifferentialAttentionSpec

STD = 0.1  # of fresh lambdas (section 2.1)


class DifferentialAttention(nn.Module):
    """Causal differential attention over packed documents.

    Args:
        hidden_size: the width H of the hidden states.
        spec: heads, rotary settings, lambda_init, biases.
        layer: the index of this layer in the model, and in a cache.
        backend: see layers/attention/backends.py.

    Raises:
        ValueError: an odd number of heads of queries, or of keys and values.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: DifferentialAttentionSpec,
        layer: int = 0,
        backend: AttentionBackend = "auto",
    ):
        super().__init__()
        heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        if heads % 2 or kv_heads % 2:
            raise ValueError(
                f"differential attention divides heads into two halves, and there are {heads} of queries and "
                f"{kv_heads} of keys; expected even numbers"
            )
        self.spec, self.layer, self.backend = spec, layer, backend
        self.axes = {"heads": heads, "key_value_heads": kv_heads, "head_dim": spec.head_dim}
        q_size, kv_size = heads * spec.head_dim, kv_heads * spec.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = PackedLinear(hidden_size, parts, spec.bias)
        self.o_proj = Linear(q_size, hidden_size, bias=spec.bias)
        for name in LAMBDAS:
            setattr(self, name, nn.Parameter(torch.empty(spec.head_dim)))
        self.reset_parameters()

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [T, H] -> [T, H]."""
        sequences = sequences.on(x.device)
        spec, cache = self.spec, sequences.cache
        q, k, v = split_rotary_qkv(
            self.qkv_proj(x),
            *sequences.positions.rotary[spec.rope],
            spec.num_attention_heads,
            spec.num_key_value_heads,
            spec.head_dim,
            interleaved=spec.rope.interleaved,
            inplace=output_is_ours(self.qkv_proj),
        )
        if cache is not None:
            keys, values = cache.append(self.layer, k, v)
            mask = cache.mask(self.layer, None)
            if mask is not None:
                return self._output(attend_cached(q, keys, in_pairs(values), spec.attention, mask))
        return self._output(attend(q, k, in_pairs(v), spec.attention, sequences, self.backend))

    def _output(self, out: Tensor) -> Tensor:
        """[T, heads, 2 head_dim] -> [T, H]."""
        first, second = out.chunk(2, dim=1)
        y = first - self._factor().to(out.dtype) * second
        y = (1 - self.spec.lambda_init) * rms_norm(y, None, self.spec.norm_eps)
        return self.o_proj(y.flatten(1))

    def _factor(self) -> Tensor:
        """lambda, in float32."""
        q1, k1, q2, k2 = (at_least_float32(getattr(self, name)) for name in LAMBDAS)
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.spec.lambda_init

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw the vectors of lambda from a normal distribution; projections are modules of their own."""
        for name in LAMBDAS:
            nn.init.normal_(getattr(self, name), 0.0, STD, generator)

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Allocate keys and values, [batch, max_length, num_key_value_heads, head_dim] each."""
        shape = (batch, max_length, self.spec.num_key_value_heads, self.spec.head_dim)
        return tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in ("keys", "values"))

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token on a GPU: the projection, which q and k are views of; the values in pairs,
        each pair twice; attention's output, and in float32 the log-sum-exp of each head; the difference, its
        statistics, and the normalised difference.
        """
        spec = self.spec.attention
        kept = itemsize * (spec.q_size + 2 * spec.kv_size + spec.v_size + spec.o_size + 2 * spec.q_size)
        return kept + 4 * (spec.num_attention_heads + spec.num_attention_heads // 2)

    def extra_repr(self) -> str:
        spec = self.spec
        heads = f"heads={spec.num_attention_heads}/{spec.num_key_value_heads}"
        return f"{heads}, head_dim={spec.head_dim}, lambda_init={spec.lambda_init:.3g}"


LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def in_pairs(values: Tensor) -> Tensor:
    """[..., heads, D] -> [..., heads, 2 D]: heads i and i + heads / 2 next to each other, in both places."""
    pairs = torch.cat(values.chunk(2, dim=-2), dim=-1)
    return torch.cat([pairs, pairs], dim=-2)
