"""A projector with a vocabulary of its own (Gemma 3n, Google DeepMind, 2025), next to the language model's.

features     norm'(norm(x) @ W^T)
id i         norm'(norm_of_ids(table[i - first_id]) @ W^T)     in place of the language model's embedding
padding      that of an id of the vocabulary, after the features of clips with fewer than all
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.specs import EmbedderSpec, NormSpec


class IdTable(nn.Module):
    """Embeddings of `ids` token ids, [ids, width]. Not an `nn.Embedding`, which tools would take for the
    language model's.
    """

    def __init__(self, ids: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ids, width))

    def forward(self) -> Tensor:
        """The whole table."""
        return self.weight.view_as(self.weight)  # an output of its own, for hooks of sharding frameworks

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise like a matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)


class Embedder(nn.Module):
    """Embed features, and the ids of the vocabulary.

    Args:
        width: of a feature, D.
        hidden_size: of the language model, H.
        spec: the ids and the norms' eps.
    """

    def __init__(self, width: int, hidden_size: int, spec: EmbedderSpec):
        super().__init__()
        self.spec, norm = spec, NormSpec(spec.eps, cast="gemma")
        self.table = IdTable(spec.ids, width)
        self.norm_of_ids, self.norm_of_features = make_norm(width, norm), make_norm(width, norm)
        self.linear = Linear(width, hidden_size, bias=False)
        self.norm_after = make_norm(hidden_size, NormSpec(spec.eps, cast="gemma", weighted=False))

    def forward(self, x: Tensor | None) -> Tensor:
        """x [F, D] -> [F, H]; None: the embeddings of all ids, [ids, H]."""
        x = self.norm_of_ids(self.table()) if x is None else self.norm_of_features(x)
        return cast(Tensor, self.norm_after(self.linear(x)))


def embeds_ids(part: Any) -> bool:
    """Whether the projector of an encoder has a vocabulary, to which the tokens of its features belong."""
    return isinstance(getattr(getattr(part, "projector", None), "spec", None), EmbedderSpec)


def embed_own_ids(part: Any, ids: Tensor, embeds: Tensor) -> Tensor:
    """Replace the embeddings [..., H] of the ids [...] that the projector of an encoder embeds, if any."""
    if not embeds_ids(part):
        return embeds
    projector, spec = part.projector, part.projector.spec
    row = ids - spec.first_id
    own = (row >= 0) & (row < spec.ids)
    # Through the whole table, which is small: the host need not know which ids there are.
    rows = projector(None).to(embeds.dtype)[row.clamp(0, spec.ids - 1)]
    return torch.where(own[..., None], rows, embeds)


def filled_up(projector: Any, features: Tensor, lengths: Sequence[int], tokens: int) -> Tensor:
    """Features [sum of lengths, H] with the projector's padding after those of each clip: [clips * tokens,
    H].
    """
    row = projector.spec.padding_row
    padding = projector(None)[row : row + 1].to(features.dtype)
    clips = features.split(list(lengths))
    return torch.cat(
        [part for clip in clips for part in (clip, padding.expand(tokens - len(clip), -1)) if len(part)]
    )
