"""PEFT's adapters of stacked experts (`target_parameters`), compatible with transformers' files.

    W_e + s B_e A_e                     lora_A [rank E, inputs], lora_B [outputs, rank E]

Our stacks have the names and axes that PEFT expects. Where a checkpoint orders a stack differently, the
adapter computes in our order and appears in theirs in every state dict (adapter_forms.py in convert/),
so PEFT's, Trainer's and run checkpoints are interchangeable with those of transformers' own model.

`stack_single_experts` stacks adapters of single experts (transformers 4): gate and up together get A stacked
and B block-diagonal. Exact; a part without an adapter has zeros.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import peft
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from liger_models.convert.checkpoints.adapter_forms import StackOrder, stack_order
from liger_models.convert.checkpoints.expressions import Cat, Expr, Stack
from liger_models.convert.errors import CheckpointError
from liger_models.layers.experts.moe import Experts


def keep_usual_order(model: Any) -> None:
    """Convert adapters on stacked experts to the usual order in state dicts.

    Raises:
        ValueError: an adapter of expert biases in another order, which it cannot express, or a PEFT before
            0.19.
        CheckpointError: unsloth wrote the adapter.
    """
    maps = [model.weight_map(layout) for layout in model.layouts]
    for path, wrapper in model.named_modules():
        if not isinstance(wrapper, ParamWrapper) or not isinstance(wrapper.get_base_layer(), Experts):
            continue
        name = f"{path.partition('.base_layer')[0]}.{wrapper.parameter_name}"
        if tuple(map(int, peft.__version__.split(".")[:2])) < (0, 19):  # takes inputs for outputs
            raise ValueError(
                f"{name}: found PEFT {peft.__version__}, whose adapters of stacked experts have their inputs "
                "and outputs exchanged; expected 0.19.1 or newer: pip install -U peft"
            )
        _refuse_unsloths_order(model, wrapper, name)
        if not hasattr(wrapper, "_usual_order"):
            forms = [weight_map[name] for weight_map in maps]
            _install(wrapper, name, stack_order(forms, model.architecture.says_transposed))


def stacks_by_names(model: Any, names: Collection[str]) -> tuple[set[str], set[str]]:
    """Return (the layer names that PEFT takes for stacked experts, the parameters it then adapts, under its
    names). It does so in families whose experts were layers in transformers 4, even for dense layers and
    shared experts with these names.
    """
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an older PEFT, which looks for layers with these names
        return set(), set()
    config = LoraConfig(target_modules=list(names))
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # a name without its pair, such as attention's gate_proj in Trinity: taken for nothing
        return set(), set()
    return set(names) - set(config.target_modules or ()), set(config.target_parameters or ())


def warn_of_layers_left_out(model: Any) -> None:
    """Warn of targeted linear layers left without an adapter because PEFT took their names for experts."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    bare = {path for path in layers if not {"base_layer", "lora_A", "lora_B"} & set(path.split("."))}
    taken, parameters = stacks_by_names(model, {path.rpartition(".")[2] for path in bare})
    trained = [config for config in model.peft_config.values() if not config.inference_mode]
    if not any(parameters & set(getattr(config, "target_parameters", None) or ()) for config in trained):
        return
    left_out = sorted(path for path in bare if path.rpartition(".")[2] in taken)
    if left_out:
        shared = ".".join(left_out[-1].split(".")[-2:])
        warnings.warn(
            f"{len(left_out)} linear layers ({left_out[0]}, ..., {left_out[-1]}) have no adapter: in "
            f"{model.config.model_type} PEFT takes {', '.join(sorted(taken))} for the stacks of experts "
            f"only. To adapt these layers too, name their weights: "
            f"LoraConfig(target_parameters=['{shared}.weight', ...])",
            stacklevel=2,
        )


def put_ranks_first(model: nn.Module, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Reorder the columns of a stack's lora_B from unsloth's order, by expert then rank, to PEFT's, by rank
    then expert. unsloth's `adapter_config.json` states the order since version 2026.9.6 (`lora_B_layout`);
    before, it only shows that unsloth wrote it.

    Args:
        config, tensors: of an adapter's files; changed in place, unsloth's marks are removed.

    Raises:
        CheckpointError: the order is unknown.
    """
    layout, mapping = config.pop("lora_B_layout", None), config.get("auto_mapping") or {}
    if mapping.get("unsloth_fixed"):
        config["auto_mapping"] = None
    for path, module in model.named_modules():
        for inner in ("", ".base_layer") if isinstance(module, Experts) else ():
            name = f"base_model.model.{path}{inner}.lora_B.weight"
            if name not in tensors or layout == "rank_major":
                continue
            if layout == "grouped_by_expert":
                by_expert = tensors[name].unflatten(1, (len(module.down_proj), -1))
                tensors[name] = by_expert.transpose(1, 2).flatten(1)
            elif layout is not None or mapping.get("unsloth_fixed"):
                raise CheckpointError(
                    f"{name}: unsloth wrote this adapter of experts, and adapter_config.json has "
                    f"lora_B_layout={layout!r}; expected 'rank_major', PEFT's order of columns, or "
                    "'grouped_by_expert', unsloth's up to version 2026.9.5 (unless trained under "
                    "UNSLOTH_MOE_LORA_MERGED=1). Add the key with the one that it is, and use "
                    "liger_models.hf.load_adapter"
                )


def _refuse_unsloths_order(model: Any, wrapper: Any, name: str) -> None:
    """Refuse unsloth's adapters, since PEFT drops the mark that `put_ranks_first` needs.

    Raises:
        CheckpointError: unsloth wrote the adapter.
    """
    for adapter in wrapper.lora_A:
        config = getattr(model, "peft_config", {}).get(adapter)
        if (getattr(config, "auto_mapping", None) or {}).get("unsloth_fixed"):
            raise CheckpointError(
                f"{name}: unsloth wrote this adapter of experts, whose columns may be in an order that is "
                "not PEFT's; load it with liger_models.hf.load_adapter(model, folder), which knows both"
            )


def stack_single_experts(
    model: Any, tensors: dict[str, Tensor], scale_of: Callable[[str], float]
) -> dict[str, tuple[int, float]]:
    """Replace adapters of single experts by adapters of stacks.

    Args:
        tensors: of an adapter's file, by their names there; changed in place.
        scale_of: returns the scale of a module's adapter.

    Returns:
        Rank and scale of each new stack adapter, by the parameter's path.

    Raises:
        CheckpointError: adapters of one stack differ in rank or scale, or some experts have none.
    """
    made: dict[str, tuple[int, float]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            stacks = {}
            for name in (module.first, "down_proj"):
                for layout in model.layouts:
                    parts = _single(model.weight_map(layout)[f"{path}.{name}"])
                    found = _joined(f"{path}.{name}", parts, tensors, scale_of)
                    if found is not None:
                        stacks[name] = found
            for name, (a, b, scale) in stacks.items():  # PEFT wraps the first wrapper in the second
                inner = ".base_layer" if name == module.first and "down_proj" in stacks else ""
                stem = f"base_model.model.{path}{inner}"
                tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
                made[f"{path}.{name}"] = (len(a) // len(module.down_proj), scale)
    return made


def _single(form: Expr) -> list[tuple[list[str], int]]:
    """Return each part's modules and their row count, for a stack whose experts are stored separately."""
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
    """Take the adapters of a stack out of `tensors`: lora_A, lora_B and scale, or None if there are none."""

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
            f"{stack}: the adapter has experts without a pair of lora_A and lora_B, or with different "
            f"ranks ({sorted(ranks)}) or scales ({sorted(scales)}); adapters of a stack need the same for "
            "all"
        )
    (rank,), (scale,) = ranks, scales
    downs, ups = [], []  # per expert: [R, inputs] and [outputs, R]
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
    """Convert an adapter that was filled in the usual order to ours.

    Raises:
        CheckpointError: A and B must be swapped, but were filled without the swap.
    """
    for path, wrapper in model.named_modules():
        order = getattr(wrapper, "_usual_order", None)
        if order is not None and adapter in wrapper.lora_A:
            if order.exchanged:
                raise CheckpointError(
                    f"{path}: the file has A where this model has B, which transformers' own loader does not "
                    "know; load it with liger_models.hf.load_adapter or peft.PeftModel.from_pretrained"
                )
            a, b = (linear[adapter].weight for linear in (wrapper.lora_A, wrapper.lora_B))
            for weight, ours in zip((a, b), order.read(a.data, b.data), strict=True):
                weight.data.copy_(ours)


def _install(wrapper: Any, name: str, order: StackOrder | None) -> None:
    wrapper._usual_order = order
    if order is None:
        return
    if wrapper.parameter_name in wrapper.get_base_layer().stacked_vectors:
        raise ValueError(
            f"{name}: an adapter on biases would have another order than in the files of other libraries; "
            "adapt the matrices, gate_up_proj and down_proj"
        )

    def write(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        _replace(module, state, prefix, order.write)

    def read(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        _replace(module, state, prefix, order.read)

    wrapper.register_state_dict_post_hook(write)
    wrapper.register_load_state_dict_pre_hook(read)


def _replace(wrapper: Any, state: dict[str, Any], prefix: str, change: Callable[..., Any]) -> None:
    for adapter in wrapper.lora_A:
        keys = [f"{prefix}{kind}.{adapter}.weight" for kind in ("lora_A", "lora_B")]
        if all(key in state for key in keys):
            state.update(zip(keys, change(*(state[key] for key in keys)), strict=True))
