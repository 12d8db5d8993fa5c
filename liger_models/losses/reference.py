"""Scores of the reference model: computed once before training and optionally cached in a file; or, when
training adapters, computed by the same model without them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.layers.specs import ModelSpec
from liger_models.losses.rows import sequence_log_probs
from liger_models.losses.shared_prompts import SharedPrompts


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disable PEFT's adapters in the model, which then is its own reference.

    Raises:
        ValueError: there are no adapters, some are merged into the weights, or other parameters are trained
            (PEFT's bias="all").
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    below = ("base_layer.", "original_module.")
    added = {p for layer in layers for name, p in layer.named_parameters() if not name.startswith(below)}
    others = [name for name, p in model.named_parameters() if p.requires_grad and p not in added]
    if not layers or others or any(getattr(layer, "merged", False) for layer in layers):
        found = "some of its adapters are merged" if layers else "it has no adapters"
        found = f"{others[0]} is trained in addition to its adapters" if layers and others else found
        raise ValueError(
            f"the model cannot be its own reference: {found}. Pass a separate reference model, or score with "
            "this model before training"
        )
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True  # enable_adapters would also change requires_grad
        yield
    finally:
        for layer, state in zip(layers, before, strict=True):
            layer._disable_adapters = state


@torch.no_grad()
def reference_log_probs(
    model: Any, batches: Iterable[Mapping[str, Tensor]], cache: str | Path | None = None
) -> list[Tensor]:
    """Log-probability of each sequence of each batch, [batch] float32 on the CPU, in evaluation mode (without
    LD-DPO's `desensitized`; for that, score the model without gradients).

    Args:
        model: has the method `score`. batches: keyword arguments of `score`: input_ids, labels,
        attention_mask and so on; or `SharedPrompts`, whose
            answers are the sequences.
        cache: a safetensors file per process. Results for the same batches and the same model (weights,
            specification, active adapters and their scaling) are read from it; others are added.
    """
    from safetensors.torch import load_file, save_file

    path = None if cache is None else Path(cache)
    known = load_file(path) if path is not None and path.exists() else {}
    weights = "" if path is None else _digest(dict(model.state_dict()), _settings(model))
    found, added, training = [], {}, model.training
    model.eval()
    try:
        for batch in batches:
            order = repr(batch.answers) if isinstance(batch, SharedPrompts) else ""
            key = "" if path is None else f"{weights}.{_digest(batch, order)}"
            if key not in known or path is None:
                scores = model.score(**batch).log_probs
                rows = batch.rows(scores) if isinstance(batch, SharedPrompts) else scores
                known[key] = added[key] = sequence_log_probs(rows).cpu()
            found.append(known[key])
    finally:
        model.train(training)
    if path is not None and added:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        save_file(known, temporary)
        temporary.replace(path)
    return found


def _settings(model: nn.Module) -> str:
    """Settings that affect scores in addition to the weights: the specification, and PEFT's layers."""
    adapters = [
        (name, layer._disable_adapters, layer.active_adapters, getattr(layer, "scaling", None))
        for name, layer in model.named_modules()
        if hasattr(layer, "_disable_adapters")
    ]
    specs = [module.spec for module in model.modules() if isinstance(getattr(module, "spec", 0), ModelSpec)]
    return f"{specs!r} {adapters!r}"


def _digest(tensors: Mapping[str, Any], settings: str = "") -> str:
    """Digest of names, dtypes, shapes and values, and of non-tensor values except None."""
    digest = hashlib.sha256(settings.encode())
    for name in sorted(name for name, value in tensors.items() if value is not None):
        tensor = tensors[name]
        if not isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.tolist() if hasattr(tensor, 'tolist') else tensor!r}".encode())
        else:
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(memoryview(flat.numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()[:32]
