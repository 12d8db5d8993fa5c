"""How the tensors of a checkpoint match a model: its layout, its head, and the dtypes that round nothing."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import nn

from liger_models.architectures import Architecture
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.reading import WEIGHT_DTYPES, CheckpointReader
from liger_models.convert.checkpoints.source_layout import SourceLayout, match_layout, repeats
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.models.causal_lm import LigerCausalLM


def find_layout(
    model: LigerCausalLM, reader: CheckpointReader, missing: tuple[str, ...] = ()
) -> SourceLayout:
    """Which of its family's layouts a checkpoint has, without the `missing` tensors of the model; from here
    on it is the model's.

    Raises:
        CheckpointError: its tensors are those of none of them.
    """
    tied = {}
    if model.spec.tie_word_embeddings:  # the head's tensor may be there beside the embedding that it repeats
        tied = dict(map(_head_and_embedding, model.architecture.layouts))
    maps = {
        layout: {name: expr for name, expr in model.weight_map(layout).items() if name not in missing}
        for layout in model.architecture.layouts
    }
    source = match_layout(reader, maps, carried=model.carried, tied_duplicates=tied)
    model.layout = source.layout
    return source


def _head_and_embedding(layout: Layout) -> tuple[str, str]:
    return layout.name("lm_head.weight"), layout.name("embed_tokens.weight")


def has_own_head(architecture: Architecture, reader: CheckpointReader) -> bool:
    """Whether a checkpoint has a head that is not its embedding. Then it is what the reference takes of a
    model that sees, whatever the config says of it, or means by saying nothing.
    """
    pairs = map(_head_and_embedding, architecture.layouts)
    there = {head: embedding for head, embedding in pairs if {head, embedding} <= reader.tensors.keys()}
    return any(not repeats(reader, head, embedding) for head, embedding in there.items())


def exact_dtypes(model: CausalLM, stored: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """A dtype for each of the model's tensors in which a checkpoint's values are exact, by native name.

    All matrices get one, since they multiply one another's results. What else is stored in a wider one, a
    norm or a bias, has that for itself: it must not double the model.

    Args:
        model: with the layout of the checkpoint.
        stored: the dtypes of the checkpoint's tensors.
    """
    tensors, canonical = model.saved_tensors(), model.weight_map(Layout())
    found = {name: {stored[ref.name] for ref in expr.refs()} for name, expr in model.weight_map().items()}
    matrices = {name for name, expr in canonical.items() if any(len(ref.shape) > 1 for ref in expr.refs())}
    # What is no dtype of weights is refused, by its name, when it is loaded.
    of_matrices = set().union(*(found[name] for name in matrices)).intersection(WEIGHT_DTYPES)
    shared = functools.reduce(torch.promote_types, of_matrices or {torch.float32})

    def exact(name: str) -> torch.dtype:
        if name in matrices:
            return shared
        least = shared if isinstance(tensors[name], nn.Parameter) else tensors[name].dtype
        wider = found[name].intersection(WEIGHT_DTYPES) if least.is_floating_point else set()
        return functools.reduce(torch.promote_types, wider, least)

    return {name: exact(name) for name in tensors}
