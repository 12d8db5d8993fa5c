"""Projectors in which queries attend to patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.kernels._copies import to_device
from liger_models.kernels._dispatch import at_least_float32
from liger_models.layers.attention.fused import unmasked_attention
from liger_models.layers.parts.mlp import plain_activation
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear, project, unwrapped
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.specs import (
    Activation,
    FrameQueriesSpec,
    LayerNormSpec,
    PerceiverSpec,
    PoolingAttentionSpec,
    QueryProjectorSpec,
    WindowQueriesSpec,
)


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
        windows = to_device(windows, x.device)
        seen, which = windows >= 0, windows.clamp(min=0)
        mean = (x[which] * seen[..., None]).sum(1) / seen.sum(1, keepdim=True).to(x.dtype)
        heads = (self.spec.num_key_value_heads, -1, self.spec.head_dim)
        q = self.q_proj(mean).unflatten(1, heads)  # [F, kv heads, group, head_dim]
        k, v = self.kv_proj(x)[which].unflatten(2, (2, *heads[::2])).permute(2, 0, 3, 1, 4)
        scores = at_least_float32(q @ k.mT) * self.spec.head_dim**-0.5  # [F, kv heads, group, n]
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
        y = self.o_proj((weights.to(v.dtype) @ v).flatten(1))
        return self.down_proj(self.activation(self.gate_proj(y)) * self.up_proj(y))


class GatedLayers(nn.Module):
    """`down_proj(act(gate_proj(x)) * up_proj(x))`, from `width` to `out`, with `size` between."""

    def __init__(self, width: int, size: int, out: int, activation: Activation):
        super().__init__()
        self.activation = plain_activation(activation)
        self.gate_proj, self.up_proj = (Linear(width, size, bias=False) for _ in range(2))
        self.down_proj = Linear(size, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., out]."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class PerceiverLayer(nn.Module):
    """A layer of `Perceiver`:

        y = latents + o_proj(attention(q, k, v)),   q from n, and k, v from c | n, of each picture
        latents' = y + mlp(norm_mlp(y))

    with n = norm_latents(latents) and c = norm_patches(patches).
    """

    def __init__(self, hidden_size: int, spec: PerceiverSpec):
        super().__init__()
        self.spec = spec
        self.norm_latents, self.norm_patches, self.norm_mlp = (
            make_norm(hidden_size, spec.norm) for _ in range(3)
        )
        keys = spec.num_key_value_heads * spec.head_dim
        self.q_proj = Linear(hidden_size, spec.num_attention_heads * spec.head_dim, bias=False)
        self.kv_proj = PackedLinear(hidden_size, {"k_proj": keys, "v_proj": keys})
        self.o_proj = Linear(self.q_proj.out_features, hidden_size, bias=False)
        self.mlp = GatedLayers(hidden_size, spec.inner_size, hidden_size, spec.activation)

    def forward(self, latents: Tensor, patches: Tensor, lengths: Sequence[int]) -> Tensor:
        """latents [F, H] and patches [P, H], of pictures of these numbers of patches -> [F, H]."""
        spec, count = self.spec, self.spec.latents
        normed = self.norm_latents(latents)
        groups = spec.num_attention_heads // spec.num_key_value_heads
        q = self.q_proj(normed).unflatten(1, (-1, spec.head_dim)).split(count)
        made = self.kv_proj(torch.cat([self.norm_patches(patches), normed]))
        made = made.unflatten(1, (2, -1, spec.head_dim)).repeat_interleave(groups, 2)
        of_patches, of_latents = made.split([len(patches), len(latents)])
        seen = []
        pieces = zip(q, of_patches.split(list(lengths)), of_latents.split(count), strict=True)
        for query, *keys in pieces:
            k, v = torch.cat(keys).permute(1, 2, 0, 3)  # [heads, patches and latents, dim]
            seen.append(_attention(query.transpose(0, 1), k, v).transpose(0, 1))
        latents = latents + self.o_proj(torch.cat(seen).flatten(1))
        return latents + self.mlp(self.norm_mlp(latents))


class Perceiver(nn.Module):
    """Latents that attend to the patches of a picture and to one another (Idefics 2, arXiv:2405.02246,
    section 3; Jaegle et al., 2021, arXiv:2103.03206):

        norm(layers(latents, mlp(x)))

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the latents, layers, heads, widths and activations.
    """

    def __init__(self, width: int, hidden_size: int, spec: PerceiverSpec):
        super().__init__()
        self.mlp = GatedLayers(width, spec.size, hidden_size, spec.patch_activation)
        self.latents = nn.Parameter(torch.empty(spec.latents, hidden_size))
        self.layers = nn.ModuleList([PerceiverLayer(hidden_size, spec) for _ in range(spec.depth)])
        self.norm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, lengths: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """x [P, D], of pictures of these numbers of patches -> [F, H]; `sizes` are as many as the latents."""
        x = self.mlp(x)
        latents = self.latents.to(x.dtype).repeat(len(lengths), 1)
        for layer in self.layers:
            latents = layer(latents, x, lengths)
        y: Tensor = self.norm(latents)
        return y

    def reset_parameters(self, *_: Any) -> None:
        """Initialise the latents to ones, as the reference does."""
        nn.init.ones_(self.latents)


class JoinedProjection(nn.Module):
    """Linear layers of queries, keys and values in one tensor, as torch's multi-head attention has them."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3 * width, width))
        self.bias = nn.Parameter(torch.empty(3 * width))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [..., D] -> the same of each."""
        parts = zip(inputs, self.weight.chunk(3), self.bias.chunk(3), strict=True)
        return tuple(project(x, weight, bias) for x, weight, bias in parts)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise like a linear layer."""
        nn.init.normal_(self.weight, 0.0, std, generator)
        nn.init.zeros_(self.bias)


class PassedAdapters(Linear):
    """The last layer of torch's multi-head attention, which multiplies by its weight without calling it: a
    layer around it, such as an adapter, has no effect in transformers, and none here.
    """

    passes_adapters = True


class QueryProjector(nn.Module):
    """Learned queries that attend to the patches of a picture (Aria, arXiv:2410.05993, section 2.2):

        q, k, v = in_proj(q_proj(norm_queries(query)), k_proj(p), v_proj(p)),   p = norm_patches(patches)
        linear_2(gelu(linear_1(norm(linear(out_proj(attention(q, k, v)))))))

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: the number of queries, heads, and the inner width.
    """

    def __init__(self, width: int, hidden_size: int, spec: QueryProjectorSpec):
        super().__init__()
        self.heads = spec.num_attention_heads
        self.query = nn.Parameter(torch.empty(spec.queries, width))
        self.norm_queries, self.norm_patches = (make_norm(width, LayerNormSpec(1e-5)) for _ in range(2))
        self.q_proj, self.k_proj, self.v_proj = (Linear(width, width, bias=False) for _ in range(3))
        self.in_proj, self.out_proj = JoinedProjection(width), PassedAdapters(width, width)
        self.linear = Linear(width, width)
        self.norm = make_norm(width, LayerNormSpec(1e-5))
        self.linear_1 = Linear(width, spec.size, bias=False)
        self.linear_2 = Linear(spec.size, hidden_size, bias=False)

    def forward(self, x: Tensor, lengths: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """x [P, D], of pictures of these numbers of patches, and the numbers of their tokens -> [F, H]."""
        query, patches = self.norm_queries(self.query.to(x.dtype)), self.norm_patches(x)
        made = self.in_proj(self.q_proj(query), self.k_proj(patches), self.v_proj(patches))
        q, k, v = (part.unflatten(1, (self.heads, -1)).transpose(0, 1) for part in made)  # [heads, ..., dim]
        keys = zip(sizes, k.split(list(lengths), 1), v.split(list(lengths), 1), strict=True)
        seen = [_attention(q[:, :n], own_k, own_v) for n, own_k, own_v in keys]
        y = self.linear(unwrapped(self.out_proj)(torch.cat(seen, 1).transpose(0, 1).flatten(1)))
        return self.linear_2(F.gelu(self.linear_1(self.norm(y)), approximate="tanh"))

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise the queries like a matrix."""
        nn.init.normal_(self.query, 0.0, std, generator)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of q [heads, queries, dim] to all keys and values [heads, keys, dim]."""
    return unmasked_attention(q[None], k[None], v[None], q.shape[-1] ** -0.5, causal=False)[0]


class LayeredProjectors(nn.Module):
    """A projector for each of some layers of the language model (Granite 4 Vision).

    Args:
        width: of the concatenated states of the encoder that are read.
        hidden_size: of the language model, H.
        spec: the layers, the states that each reads, and the parts of a projector.
    """

    def __init__(self, width: int, hidden_size: int, spec: WindowQueriesSpec):
        super().__init__()
        self.spec = spec
        own = width // (max(spec.states) + 1)
        averaged = len(spec.layers) - spec.corners
        self.layerwise = nn.ModuleList([WindowQueries(own, hidden_size, spec) for _ in range(averaged)])
        corners = [WindowQueries(own, hidden_size, spec, corner) for corner in range(spec.corners)]
        self.spatial = nn.ModuleList(corners)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [P, states * D], of pictures row by row -> the features for each layer, [F, H], in the order of
        `spec.layers`.
        """
        states = x.unflatten(1, (max(self.spec.states) + 1, -1)).unbind(1)
        projectors = [*self.layerwise, *self.spatial]
        return tuple(project(states[i]) for project, i in zip(projectors, self.spec.states, strict=True))


class WindowQueries(nn.Module):
    """`linear(Q-Former(norm_queries(query + reduced), norm(patches) + positions))` of each window of patches,
    with `reduced` the patches' means, or with a `corner`, 0 to 3, one patch of each four.
    """

    def __init__(self, width: int, hidden_size: int, spec: WindowQueriesSpec, corner: int | None = None):
        super().__init__()
        self.spec, self.corner = spec, corner
        self.norm = make_norm(width, LayerNormSpec(1e-6))
        self.query = nn.Parameter(torch.empty(1, spec.queries**2, width))
        self.positions = nn.Parameter(torch.empty(1, spec.window**2, width))
        self.norm_queries = make_norm(width, spec.norm)
        self.layers = nn.ModuleList([QueryLayer(width, spec, i) for i in range(spec.depth)])
        self.linear = Linear(width, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], of pictures row by row -> [F, H], `spec.token_side`^2 for each picture."""
        spec, x = self.spec, self.norm(x)
        pictures = x.view(-1, spec.side, spec.side, x.shape[1])
        if self.corner is None:
            reduced = F.adaptive_avg_pool2d(pictures.permute(0, 3, 1, 2), spec.token_side).permute(0, 2, 3, 1)
        else:
            reduced = pictures[:, self.corner // 2 :: 2, self.corner % 2 :: 2]
        queries = self.query.to(x.dtype) + _in_windows(reduced, spec.queries)
        patches = _in_windows(pictures, spec.window) + self.positions.to(x.dtype)
        queries = self.norm_queries(queries)
        for layer in self.layers:
            queries = layer(queries, patches)
        count = spec.token_side // spec.queries
        rows = queries.view(-1, count, count, spec.queries, spec.queries, x.shape[1]).transpose(2, 3)
        return self.linear(rows.reshape(-1, x.shape[1]))

    def reset_parameters(self, *_: Any, generator: torch.Generator | None = None) -> None:
        """Initialise queries and positions as the reference does."""
        for parameter in (self.query, self.positions):
            nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5, generator)


class FrameQueries(nn.Module):
    """`linear(Q-Former(norm_queries(query), x))` of each window of frames of sound (Granite Speech).

    Args:
        width: of a frame, D.
        hidden_size: of the language model, H.
        spec: the window, the queries and the Q-Former's parts.
    """

    def __init__(self, width: int, hidden_size: int, spec: FrameQueriesSpec):
        super().__init__()
        self.window = spec.window
        self.query = nn.Parameter(torch.empty(1, spec.queries, spec.width))
        self.norm_queries = make_norm(spec.width, spec.norm)
        self.layers = nn.ModuleList([QueryLayer(spec.width, spec, i, width) for i in range(spec.depth)])
        self.linear = Linear(spec.width, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [windows * window, D] -> [windows * queries, H]."""
        frames = x.view(-1, self.window, x.shape[1])
        queries = self.norm_queries(self.query.to(x.dtype))
        for layer in self.layers:
            queries = layer(queries, frames)
        return self.linear(queries.flatten(0, 1))

    def reset_parameters(self, *_: Any, generator: torch.Generator | None = None) -> None:
        """Initialise queries as the reference does."""
        nn.init.normal_(self.query, 0.0, 1.0, generator)


class QueryAttention(nn.Module):
    """`norm(q + o_proj(attention of q to x))`, in heads. `inputs`: the width of x."""

    def __init__(self, width: int, spec: WindowQueriesSpec | FrameQueriesSpec, inputs: int):
        super().__init__()
        self.heads = spec.num_attention_heads
        self.q_proj = Linear(width, width)
        self.kv_proj = PackedLinear(inputs, {"k_proj": width, "v_proj": width}, bias=True)
        self.o_proj = Linear(width, width)
        self.norm = make_norm(width, spec.norm)

    def forward(self, queries: Tensor, x: Tensor) -> Tensor:
        """queries [windows, Q, D] and x [windows, n, inputs] -> [windows, Q, D]."""
        q = self.q_proj(queries).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv_proj(x).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = unmasked_attention(q, k, v, q.shape[-1] ** -0.5, causal=False).transpose(1, 2).flatten(2)
        y: Tensor = self.norm(queries + self.o_proj(seen))
        return y


class QueryLayer(nn.Module):
    """A layer of the Q-Former (BLIP-2, arXiv:2301.12597, section 3.1): queries attend to one another, in
    every `spec.frequency`th layer to patches, and pass through an MLP, with a norm after each sum.
    `inputs`: the width of patches, or of frames of sound.
    """

    def __init__(
        self, width: int, spec: WindowQueriesSpec | FrameQueriesSpec, layer: int, inputs: int | None = None
    ):
        super().__init__()
        self.activation = plain_activation(spec.activation)
        self.attention = QueryAttention(width, spec, width)
        crosses = layer % spec.frequency == 0
        self.crossattention = QueryAttention(width, spec, inputs or width) if crosses else None
        self.up_proj, self.down_proj = Linear(width, spec.size), Linear(spec.size, width)
        self.norm_mlp = make_norm(width, spec.norm)

    def forward(self, queries: Tensor, patches: Tensor) -> Tensor:
        """queries [windows, Q, D], or [1, Q, D] where those of all windows are the same, and patches
        [windows, n, inputs] -> [windows, Q, D].
        """
        queries = self.attention(queries, queries)
        if self.crossattention is not None:
            queries = self.crossattention(queries.expand(len(patches), -1, -1), patches)
        y: Tensor = self.norm_mlp(queries + self.down_proj(self.activation(self.up_proj(queries))))
        return y


def _in_windows(pictures: Tensor, side: int) -> Tensor:
    """Pictures [n, S, S, D] -> [windows, side^2, D]."""
    count = pictures.shape[1] // side
    windows = pictures.unflatten(1, (count, side)).unflatten(3, (count, side)).transpose(2, 3)
    return windows.flatten(0, 2).flatten(1, 2)


OF_QUERIES: dict[type, type[nn.Module]] = {
    PoolingAttentionSpec: PoolingAttention,
    PerceiverSpec: Perceiver,
    QueryProjectorSpec: QueryProjector,
    WindowQueriesSpec: LayeredProjectors,
    FrameQueriesSpec: FrameQueries,
}
"""The projectors of this file."""
