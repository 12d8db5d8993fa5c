"""The optimizer of a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.expressions import Cat, Expr, Ref
from liger_models.layers.attention.self_attention import Attention
from liger_models.layers.experts.moe import Experts
from liger_models.layers.experts.router import Router
from liger_models.layers.projections.matrices import matrices
from liger_models.layers.specs import AttentionSpec
from liger_models.optim.adamw import AdamW, state_bytes
from liger_models.optim.library import MUON, SPLIT, LibraryOptimizer, library_state_bytes, library_work

# The second moment forgets faster than with Adam's default 0.999, as usual for language models since GPT-3
# (Brown et al., 2020, appendix B): runs of some thousand steps are too short for a memory of 1000 steps.
BETAS = (0.9, 0.95)
EPS = 1e-8

QUERY_KEY_VALUE = ("qkv_proj", "q_proj", "k_proj", "v_proj")  # fused, or separate
_MULTIPLY = (nn.Linear, Experts, Router)  # whose matrices are multiplied with hidden states


def build_optimizer(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    weights: str,
    moments: str,
    seed: int,
    name: str = "adamw",
    state_device: str | None = None,
) -> AdamW:
    """The optimizer of this name (`OPTIMIZERS`), with weight decay on matrices only: decaying a norm's
    weight, a bias or a short convolution's taps regularises nothing, even if those of all heads or experts
    form one tensor.

    Raises:
        ConfigError: the package of the optimizer is not installed.
    """
    decayed = {p for *_, p in matrices(model)}
    groups: dict[tuple[str | None, bool], list[Tensor]] = {}
    for parameter, library in _libraries(model, name):
        groups.setdefault((library, parameter not in decayed), []).append(parameter)
    listed: list[dict[str, Any]] = [
        {"params": groups[key], "weight_decay": 0.0 if key[1] else weight_decay, "library": key[0]}
        for key in sorted(groups, key=str)
    ]
    if name != "adamw":
        forms = _forms(model, by_head=name == "muon_heads")
        return LibraryOptimizer(
            listed, lr, BETAS, EPS, weights=weights, moments=moments, seed=seed, forms=forms
        )
    for group in listed:
        del group["library"]
    return AdamW(
        *(listed, lr, BETAS, EPS), weights=weights, moments=moments, seed=seed, state_device=state_device
    )


def optimizer_memory(
    model: nn.Module, name: str, dtype: torch.dtype, weights: str, moments: str, lora_rank: int = 0
) -> tuple[float, int]:
    """Bytes of state per trained element, and temporary bytes of a step, except for AdamW.

    Args:
        model: the model; parameters may be on the meta device.
        name: one of `OPTIMIZERS`.
        dtype: dtype of the trained weights.
        lora_rank: rank of adapters that are trained instead of the model; 0: none.
    """
    own = state_bytes(dtype, weights, moments)
    if name == "adamw":
        return own, 0
    if lora_rank:
        square = (lora_rank, lora_rank) if name == "adafactor" else (1 << 20,)
        per_element = library_state_bytes(name, [square], dtype, weights) / torch.Size(square).numel()
        return per_element, library_work(name, lora_rank << 16, dtype)
    forms = _forms(model)
    total, elements, largest = 0.0, 0, 0
    for parameter, library in _libraries(model, name):
        elements += parameter.numel()
        if library is None:
            total += own * parameter.numel()
            continue
        split = forms.get(parameter) if library in SPLIT else None
        shapes = [parameter.shape] if split is None else [ref.shape for ref in split.refs()]
        total += library_state_bytes(library, shapes, dtype, weights)
        largest = max(largest, parameter.numel())
    return total / max(1, elements), library_work(name, largest, dtype)


def _libraries(model: nn.Module, name: str) -> Iterator[tuple[nn.Parameter, str | None]]:
    """Yield the trained parameters, each with the library's optimizer that updates it, or None for our AdamW.

    Muon's are the matrices of linear layers, experts and routers, without the head, as in Liu et al. (2025,
    arXiv:2502.16982, section 2); embeddings of tokens and of positions are AdamW's.
    """
    by_muon: set[Tensor] = set()
    if name in MUON:
        head = set(getattr(model, "lm_head", nn.Identity()).parameters())  # perhaps the embedding, too
        by_muon = {p for module, _, p in matrices(model) if isinstance(module, _MULTIPLY) and p not in head}
    for parameter in model.parameters():
        if parameter.requires_grad:
            library = None if name == "adamw" or (name in MUON and parameter not in by_muon) else name
            yield parameter, library


def _forms(model: nn.Module, by_head: bool = False) -> dict[Tensor, Expr]:
    """The canonical form of each parameter that consists of several tensors of separate projections.

    Args:
        by_head: divide the rows of queries, keys and values into heads as well.
    """
    forms: dict[str, Expr] = dict(getattr(model, "canonical_forms", {}))
    parameters = dict(model.named_parameters())
    if by_head:
        for path, module in model.named_modules():
            if isinstance(module, Attention):
                for name in parameters.keys() & {f"{path}.{own}.weight" for own in QUERY_KEY_VALUE}:
                    whole = forms.get(name, Ref(name, tuple(parameters[name].shape)))
                    forms[name] = whole.with_refs(partial(_heads, module.spec))
    return {
        parameters[name]: form
        for name, form in forms.items()
        if name in parameters and len(list(form.refs())) > 1
    }


def _heads(spec: AttentionSpec, ref: Ref) -> Expr:
    head_dim = spec.value_dim if ".v_proj." in ref.name else spec.head_dim
    shape = (head_dim, *ref.shape[1:])
    return Cat(tuple(Ref(f"{ref.name}.{head}", shape) for head in range(ref.shape[0] // head_dim)))
