"""PEFT's adapters of stacked experts (`target_parameters`), in files as those of transformers' own models.

    W_e + s B_e A_e                     lora_A [rank E, inputs], lora_B [outputs, rank E]

Our stacks have the names and the axes that PEFT gives an adapter. Where a family's checkpoints have the rows
of a stack in another order than we (gpt-oss: gate and up alternating), an adapter has its rows and columns in
our order while it computes, and in theirs in every state dict: what PEFT, Trainer or a checkpoint of a run
writes is what transformers' own model reads, and the other way round.

Adapters of single experts, as transformers 4 had them, become those of stacks (`stack_single_experts`): those
of gate and up together have A stacked and B block-diagonal. Exact; a part without adapter has zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from liger_models.convert.checkpoints.weight_map import Cat, Expr, Stack
from liger_models.convert.errors import CheckpointError
from liger_models.layers.moe import Experts


def keep_usual_order(model: Any) -> None:
    """Let the adapters on stacked experts of one of our models be in the usual order in state dicts.

    Raises:
        ValueError: an adapter of the experts' biases where their order is another: it cannot be told.
    """
    maps = [model.weight_map(layout) for layout in model.layouts]
    for path, wrapper in model.named_modules():
        if not isinstance(wrapper, ParamWrapper) or getattr(wrapper, "_usual_order", None) is not None:
            continue
        experts = wrapper.get_base_layer()
        if isinstance(experts, Experts):
            name = f"{path.partition('.base_layer')[0]}.{wrapper.parameter_name}"
            _install(wrapper, name, _usual_order([weight_map[name] for weight_map in maps]))


def stack_single_experts(
    model: Any, tensors: dict[str, Tensor], scale_of: Callable[[str], float]
) -> dict[str, tuple[int, float]]:
    """Put adapters of stacks in the place of those of single experts.

    Args:
        tensors: of an adapter's file, by their names there; changed in place.
        scale_of: the scale of the adapter of a module.

    Returns:
        Of each stack that has an adapter now, by the parameter's path, the rank and the scale.

    Raises:
        CheckpointError: adapters of one stack with different ranks or scales, or of some experts alone.
    """
    made: dict[str, tuple[int, float]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            stacks = {}
            for name in ("gate_up_proj", "down_proj"):
                for layout in model.layouts:
                    parts = _single(model.weight_map(layout)[f"{path}.{name}"])
                    found = _joined(f"{path}.{name}", parts, tensors, scale_of)
                    if found is not None:
                        stacks[name] = found
            for name, (a, b, scale) in stacks.items():  # PEFT puts the wrapper of the second around the first
                inner = ".base_layer" if name == "gate_up_proj" and "down_proj" in stacks else ""
                stem = f"base_model.model.{path}{inner}"
                tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
                made[f"{path}.{name}"] = (len(a) // len(module.down_proj), scale)
    return made


def _single(form: Expr) -> list[tuple[list[str], int]]:
    """Of a stack whose experts are stored by themselves, each part's modules and the rows of each."""
    parts = form.parts if isinstance(form, Cat) else (form,)
    if not all(isinstance(part, Stack) for part in parts):
        return []
    return [([ref.name.removesuffix(".weight") for ref in part.refs()], part.shape[1]) for part in parts]


def _joined(
    stack: str,
    parts: list[tuple[list[str], int]],
    tensors: dict[str, Tensor],
    scale_of: Callable[[str], float],
) -> tuple[Tensor, Tensor, float] | None:
    """lora_A, lora_B and scale of a stack, taken out of `tensors`; None if there are none."""

    def take(module: str, kind: str) -> Tensor | None:
        return tensors.pop(f"base_model.model.{module}.{kind}.weight", None)

    pairs = {m: (take(m, "lora_A"), take(m, "lora_B")) for names, _ in parts for m in names}
    there = {module for module, (a, b) in pairs.items() if a is not None or b is not None}
    given = [names for names, _ in parts if there & set(names)]
    if not given:
        return None
    modules = [module for names in given for module in names]
    whole = {m: (a, b) for m, (a, b) in pairs.items() if a is not None and b is not None}
    ranks, scales = {len(a) for a, _ in whole.values()}, {scale_of(module) for module in modules}
    if len(ranks) != 1 or len(scales) != 1 or not whole.keys() >= set(modules):
        raise CheckpointError(
            f"{stack}: the adapter has experts without a pair of lora_A and lora_B, or with different ranks "
            f"({sorted(ranks)}) or scales ({sorted(scales)}); one of a stack has the same for all"
        )
    (rank,), (scale,) = ranks, scales
    downs, ups = [], []  # of each expert [R, inputs] and [outputs, R]
    for expert in range(len(parts[0][0])):
        downs.append(torch.cat([whole[names[expert]][0] for names in given]))
        up = downs[0].new_zeros(sum(rows for _, rows in parts), rank * len(given))
        row = column = 0
        for names, rows in parts:
            if names in given:
                up[row : row + rows, column : column + rank] = whole[names[expert]][1]
                column += rank
            row += rows
        ups.append(up)
    return torch.cat(downs), torch.stack(ups, -1).flatten(1), scale


def take_usual_order(model: nn.Module, adapter: str) -> None:
    """Put an adapter whose parameters were filled in the usual order into ours."""
    wrappers: list[Any] = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    for wrapper in wrappers:
        if getattr(wrapper, "_usual_order", None):
            outputs, inputs = wrapper._usual_order
            for linear, dim, order in ((wrapper.lora_A, 1, inputs), (wrapper.lora_B, 0, outputs)):
                if adapter in linear:
                    weight = linear[adapter].weight
                    weight.data.copy_(weight.data.index_select(dim, order.argsort().to(weight.device)))


def _install(wrapper: Any, name: str, order: tuple[Tensor, Tensor] | None) -> None:
    wrapper._usual_order = order or ()
    if order is None:
        return
    if wrapper.get_param().dim() != 3:
        raise ValueError(
            f"{name}: an adapter of biases would be in another order than in other people's files; adapt the "
            "matrices, gate_up_proj and down_proj"
        )
    outputs, inputs = order
    back = outputs.argsort(), inputs.argsort()

    def write(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        _reorder(module, state, prefix, outputs, inputs)

    def read(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        _reorder(module, state, prefix, *back)

    wrapper.register_state_dict_post_hook(write)
    wrapper.register_load_state_dict_pre_hook(read)


def _reorder(wrapper: Any, state: dict[str, Any], prefix: str, outputs: Tensor, inputs: Tensor) -> None:
    for adapter in wrapper.lora_A:
        for kind, dim, order in (("lora_A", 1, inputs), ("lora_B", 0, outputs)):
            key = f"{prefix}{kind}.{adapter}.weight"
            if key in state:
                state[key] = state[key].index_select(dim, order.to(state[key].device))


def _usual_order(forms: list[Expr]) -> tuple[Tensor, Tensor] | None:
    """At each place of a checkpoint's stack, the number of our output [2 I], and of our input [H]; None where
    both are in our order, or each expert is stored by itself.
    """
    whole = next((form for form in forms if len(list(form.refs())) == 1), None)
    if whole is None:
        return None
    orders = []
    for dim in range(1, len(whole.shape)):
        numbers = torch.arange(whole.shape[dim]).view(
            [-1 if i == dim else 1 for i in range(len(whole.shape))]
        )
        ((_, _, _, view),) = whole.places(numbers.expand(whole.shape))  # without memory of its own
        orders.append(view[tuple(slice(None) if stride else 0 for stride in view.stride())].flatten())
    if all(order.equal(torch.arange(len(order))) for order in orders):
        return None
    return orders[0], orders[-1]
