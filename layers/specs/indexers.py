"""Indexers, which choose the keys that attention sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IndexerSpec:
    """The choice of the `top_k` keys that a query attends to (DeepSeek-V3.2's lightning indexer), by
    `num_heads` queries of `head_dim` against one key per token. The first dimensions of both, or the last
    ones if `rotates_last`, are rotated as the layer's own, `interleaved` or by halves. `norm_eps` is that of
    the norm of keys; with `float32_weights` the weights of heads are computed in float32, whatever the
    model's dtype. `scale` multiplies the scores, which matters to the indexer's loss alone.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool = False
    rotates_last: bool = False
    norm_eps: float = 1e-6
    float32_weights: bool = False
    scale: float = 1.0

    @property
    def key_size(self) -> int:
        """Elements that are cached per token."""
        return self.head_dim


@dataclass(frozen=True)
class GatedPoolsSpec:
    """The choice of `top_k` pools of `size` keys for each query (GLM-5.3-Flash), by `num_heads` queries of
    `head_dim` against one key per pool: layers/parts/gated_pools.py.
    """

    num_heads: int
    head_dim: int
    size: int
    top_k: int

    @property
    def key_size(self) -> int:
        """Elements that are cached per token: its key, and its gate in the pool."""
        return 2 * self.head_dim


@dataclass(frozen=True)
class BlockIndexerSpec:
    """The choice of `top_k` blocks of `size` keys for each query and group of heads (MiniMax-M3's indexer),
    by one query of `head_dim` per group, of `num_groups`, against one key per token. Both are normalised and
    rotated as the layer's own queries and keys. The `local` last blocks are always among the chosen ones.
    """

    num_groups: int
    head_dim: int
    size: int
    top_k: int
    local: int


@dataclass(frozen=True)
class PooledIndexerSpec:
    """The choice of `top_k` whole blocks of `size` keys for each query (Qwen4's indexer), by `num_heads`
    queries of `head_dim` against one mean key per block. Keys after the last whole block are always chosen.
    Norms and rotation are those of the layer's own queries and keys.
    """

    num_heads: int
    head_dim: int
    size: int
    top_k: int
