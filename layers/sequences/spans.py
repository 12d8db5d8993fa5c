"""Bidirectional spans of the language model, visible in addition to the preceding tokens: an image's tokens,
or the prefix of a document.

A span is a run of such tokens within a document. All of it is computed on the device without synchronisation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.layers.sequences.documents import Documents


def spans_of(documents: Documents, together: Tensor) -> Tensor:
    """Start and end of each token's span, [2, T] int32: runs of tokens marked in `together` [T] bool; any
    other token is a span of its own.
    """
    token = torch.arange(len(together), device=together.device)
    begins = _begins(documents, together)
    ends = torch.cat([begins[1:], begins.new_ones(1)])
    first = torch.where(begins, token, 0).cummax(0).values
    end = torch.where(ends, token + 1, len(token)).flip(0).cummin(0).values.flip(0)
    return torch.where(together, torch.stack([first, end]), torch.stack([token, token + 1])).int()


def prefixes(documents: Documents, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """The spans of tokens of kind 0 [T]; and a bool on the device, true if one of them is not at the
    beginning of its document, or a kind is neither 0 nor 1.
    """
    token = torch.arange(len(kinds), device=kinds.device)
    begins = _begins(documents, kinds == 0) & (token != _first(documents, token))
    wrong = ((begins & (kinds == 0)) | ((kinds != 0) & (kinds != 1))).any()
    return spans_of(documents, kinds == 0), wrong


def _begins(documents: Documents, together: Tensor) -> Tensor:
    token = torch.arange(len(together), device=together.device)
    return (token == _first(documents, token)) | (together != together.roll(1))


def _first(documents: Documents, token: Tensor) -> Tensor:
    """The first token of each token's document."""
    bounds = documents.bounds()
    return torch.zeros_like(token) if bounds is None else bounds[0].long()
