"""Matching of a checkpoint's tensors to a model: layout, head, and lossless dtypes."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import nn

from liger_models.architectures import Architecture, find_architecture
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.reading import WEIGHT_DTYPES, CheckpointReader
from liger_models.convert.checkpoints.source_layout import SourceLayout, match_layout, repeats
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import UnsupportedModelError
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.specs import ModelSpec
from liger_models.models.causal_lm import LigerCausalLM


def architecture_of(config: HFConfig) -> Architecture:
    """The architecture of a config's `model_type`.

    Raises:
        UnsupportedModelError: there is none.
    """
    try:
        return find_architecture(config.model_type)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{config.name}: {error}") from error


def find_layout(
    model: LigerCausalLM, reader: CheckpointReader, missing: tuple[str, ...] = ()
) -> SourceLayout:
    """Find the checkpoint's layout among its family's, without the model's `missing` tensors, and assign it
    to the model.

    Raises:
        CheckpointError: no layout matches.
    """
    tied = {
        copy: original
        for copy, original in copies_in_modules(model.spec, model.architecture)
        if original in reader.tensors
    }
    if model.spec.tie_word_embeddings:  # the head's tensor may duplicate the embedding
        pairs = map(_head_and_embedding, model.architecture.layouts)  # layouts may share the head's name
        tied |= {head: embedding for head, embedding in pairs if embedding in reader.tensors}
    maps = {
        layout: {name: expr for name, expr in model.weight_map(layout).items() if name not in missing}
        for layout in model.architecture.layouts
    }
    source = match_layout(reader, maps, carried=model.carried, tied_duplicates=tied)
    model.layout = source.layout
    return source


def _head_and_embedding(layout: Layout) -> tuple[str, str]:
    return layout.name("lm_head.weight"), layout.name("embed_tokens.weight")


def copies_in_modules(spec: ModelSpec, architecture: Architecture) -> list[tuple[str, str]]:
    """Names of the copies of the embedding and the head that checkpoints may have in modules for multi-token
    prediction, each with the name of its original.
    """
    if spec.mtp is None:
        return []
    modules = range(spec.mtp.first, spec.mtp.first + len(spec.mtp.blocks))
    head = "embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
    return [
        (layout.name(f"mtp.{number}.{table}"), layout.name(original))
        for layout in architecture.layouts
        for number in modules
        for table, original in (("embed_tokens.weight",) * 2, ("lm_head.weight", head))
    ]


def has_own_head(architecture: Architecture, reader: CheckpointReader) -> bool:
    """Whether a checkpoint has a head that differs from its embedding. For vision-language models the
    reference then uses it, regardless of the config.
    """
    pairs = map(_head_and_embedding, architecture.layouts)
    there = {head: embedding for head, embedding in pairs if {head, embedding} <= reader.tensors.keys()}
    return any(not repeats(reader, head, embedding) for head, embedding in there.items())


def dtypes_of_files(
    model: LigerCausalLM,
    stored: dict[str, torch.dtype],
    of_decoded: torch.dtype | None,
    fresh: tuple[str, ...],
) -> dict[str, torch.dtype]:
    """`exact_dtypes` of a checkpoint without the `fresh` parameters, which get the embedding's dtype."""
    of_fresh = {model.layout.name(name): stored[model.layout.name("embed_tokens.weight")] for name in fresh}
    return exact_dtypes(model, stored | of_fresh, of_decoded)


def exact_dtypes(
    model: CausalLM, stored: Mapping[str, torch.dtype], of_decoded: torch.dtype | None = None
) -> dict[str, torch.dtype]:
    """Dtype of each of the model's tensors, by native name, that represents the checkpoint's values exactly.

    All matrices have the same dtype, since they are multiplied with each other's results. Other tensors
    stored in a wider dtype, such as a norm, a bias or a short convolution, keep it for themselves instead of
    widening the whole model, and so do matrices whose products are in float32 (`wider_matrices` of their
    modules).

    Args:
        model: with the checkpoint's layout.
        stored: dtypes of the checkpoint's tensors.
        of_decoded: dtype of the quantised weights of a checkpoint, which all of its matrices get. No narrow
            one holds the products of codes and scales exactly.
    """
    tensors, canonical = model.saved_tensors(), model.weight_map(Layout())
    found = {name: {stored[ref.name] for ref in expr.refs()} for name, expr in model.weight_map().items()}
    matrices = {name for name, expr in canonical.items() if any(len(ref.shape) > 1 for ref in expr.refs())}
    matrices -= {
        f"{path}.{name}"
        for path, m in model.named_modules()
        for kind in ("stacked_vectors", "wider_matrices")
        for name in getattr(m, kind, ())
    }
    matrices = {name for name in matrices if tensors[name].is_floating_point()}
    # Dtypes unsupported for weights raise an error with their name during loading.
    of_matrices = set().union(*(found[name] for name in matrices)).intersection(WEIGHT_DTYPES)
    shared = of_decoded or functools.reduce(torch.promote_types, of_matrices or {torch.float32})

    def exact(name: str) -> torch.dtype:
        if name in matrices:
            return shared
        least = shared if isinstance(tensors[name], nn.Parameter) else tensors[name].dtype
        wider = found[name].intersection(WEIGHT_DTYPES) if least.is_floating_point else set()
        return functools.reduce(torch.promote_types, wider, least)

    return {name: exact(name) for name in tensors}
