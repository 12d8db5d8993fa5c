"""Projectors in which queries attend to patches."""

from __future__ import annotations

from torch import Tensor, nn

from liger_models.kernels._dispatch import at_least_float32
from liger_models.layers.parts.mlp import plain_activation
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.specs import PoolingAttentionSpec


class PoolingAttention(nn.Module):
    """For each token the attention of one query to a few patches, the query made of their mean (Molmo 2):

        q = mean(patches) @ W_q^T + b,   k, v = patches @ W_kv^T + b
        down_proj(act(gate_proj(y)) * up_proj(y)),   y = o_proj(softmax(q k^T / sqrt(head_dim)) v)

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: heads, widths, activation and biases.
    """

    def __init__(self, width: int, hidden_size: int, spec: PoolingAttentionSpec):
        super().__init__()
        self.spec, self.activation = spec, plain_activation(spec.activation)
        keys = spec.num_key_value_heads * spec.head_dim
        self.q_proj = Linear(width, spec.num_attention_heads * spec.head_dim, bias=spec.bias)
        self.kv_proj = PackedLinear(width, {"k_proj": keys, "v_proj": keys}, bias=spec.bias)
        self.o_proj = Linear(self.q_proj.out_features, spec.size, bias=spec.bias)
        self.gate_proj = Linear(spec.size, spec.intermediate_size, bias=spec.mlp_bias)
        self.up_proj = Linear(spec.size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = Linear(spec.intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor, windows: Tensor) -> Tensor:
        """x [P, D], and the numbers of each token's patches, windows [F, n], -1 for none -> [F, H]."""
        windows = windows.to(x.device, non_blocking=True)
        seen, which = windows >= 0, windows.clamp(min=0)
        mean = (x[which] * seen[..., None]).sum(1) / seen.sum(1, keepdim=True).to(x.dtype)
        heads = (self.spec.num_key_value_heads, -1, self.spec.head_dim)
        q = self.q_proj(mean).unflatten(1, heads)  # [F, kv heads, group, head_dim]
        k, v = self.kv_proj(x)[which].unflatten(2, (2, *heads[::2])).permute(2, 0, 3, 1, 4)
        scores = at_least_float32(q @ k.mT) * self.spec.head_dim**-0.5  # [F, kv heads, group, n]
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
        y = self.o_proj((weights.to(v.dtype) @ v).flatten(1))
        return self.down_proj(self.activation(self.gate_proj(y)) * self.up_proj(y))
