"""LoRA adapters of PEFT on packed projections, in files under the usual names. Files of other adapters are
PEFT's own.

A packed projection is one layer, and so has one adapter: W + s B A, with W = cat(W_q, W_k, W_v) by rows.

    packed -> usual:  each part gets A itself, and of B (and of DoRA's magnitude) its rows, in the order in
                      which transformers' own model has them. Exact.
    usual -> packed:  where the parts share A, the way back. Else A is stacked and B block-diagonal, the rank
                      is the sum of the parts' ranks, and alpha is such that the scale s stays. Exact; a part
                      without adapter has zeros.

Modules bear the names of transformers' own (module_names.py). What is a linear layer there and a parameter
here, as some routers are, has its adapter on the parameter.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from liger_models.convert.checkpoints.expressions import Ref
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.errors import CheckpointError
from liger_models.convert.json_file import read_json
from liger_models.layers.experts.moe import Experts
from liger_models.layers.projections.packed_linear import packed_here_alone

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_adapter(model: Any, folder: str | Path, adapter_name: str = "default") -> None:
    """Write an adapter of a PeftModel as PEFT writes it, under the usual names where projections are packed.
    transformers' own model, and whatever else reads PEFT's files, loads it.

    Raises:
        CheckpointError: a packed projection is adapted by something else than LoRA or DoRA, or is one whose
            usual names mean stacks of experts to PEFT.
    """
    folder = Path(folder)
    _refuse_names_of_experts(model, adapter_name)
    model.save_pretrained(folder, selected_adapters=[adapter_name])
    folder = folder if adapter_name == "default" else folder / adapter_name
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    tensors = load_file(folder / TENSORS)
    packed = _packed(model.get_base_model())
    _onto_layers(model.get_base_model(), config, tensors)
    for path, parts in packed.items():
        stem = f"base_model.model.{path}."
        kinds = {name.removeprefix(stem): name for name in tensors if name.startswith(stem)}
        for kind, name in kinds.items():
            if kind not in _KINDS:
                raise CheckpointError(
                    f"{name}: of a packed projection only {', '.join(_KINDS)} can be divided; call "
                    "model.split_projections() before the adapter is made"
                )
            whole = tensors.pop(name)
            for part, rows in parts.items():
                tensor = whole.clone() if kind == "lora_A.weight" else whole[rows]
                tensors[f"base_model.model.{_beside(path, part)}.{kind}"] = tensor
    if not _is_lora(config):
        return
    parts_by_name: dict[str, list[str]] = {}  # not every layer has all of them
    for path, parts in packed.items():
        found = parts_by_name.setdefault(path.rpartition(".")[2], [])
        found += [part for part in parts if part not in found]
    _write(folder, _with_usual_names(config, parts_by_name), tensors)


def load_adapter(model: nn.Module, folder: str | Path, **options: Any) -> Any:
    """A PeftModel of one of our models with an adapter from a folder, whose names are the usual ones,
    however the model's projections are.

    Args:
        model: one of our models.
        folder: what PEFT or `save_adapter` wrote.
        options: of `PeftModel.from_pretrained`, such as `is_trainable`.

    Adapters of single experts, as transformers 4 had them, become those of stacks; dropout, which these
    cannot have, is left out unless they are to be trained.

    Raises:
        CheckpointError: an adapter that no packed projection or stack can have, or of which a tensor has no
            place; one of experts that unsloth wrote, which does not say in which order its columns are.
    """
    import peft

    config = read_json(Path(folder) / CONFIG)
    tensors = load_file(Path(folder) / TENSORS)
    if _is_lora(config):
        _convert(model, config, tensors, bool(options.get("is_trainable")))
        with tempfile.TemporaryDirectory() as converted:
            _write(Path(converted), config, tensors)
            adapted = peft.PeftModel.from_pretrained(model, converted, **options)
    else:
        adapted = peft.PeftModel.from_pretrained(model, folder, **options)
    expected = peft.get_peft_model_state_dict(adapted, adapter_name=options.get("adapter_name", "default"))
    if wrong := sorted(expected.keys() ^ tensors.keys()):
        raise CheckpointError(f"{folder}: the adapter and the model differ in {wrong[:4]}")
    return adapted


def _is_lora(config: Mapping[str, Any]) -> bool:
    return config.get("peft_type", "LORA") == "LORA"


def _convert(model: Any, config: dict[str, Any], tensors: dict[str, Tensor], is_trainable: bool) -> None:
    """Turn a LoRA adapter under the usual names into one of this model."""
    from liger_models.hf.adapters.expert_adapters import (
        put_ranks_first,
        stack_single_experts,
        stacks_by_names,
    )

    put_ranks_first(model, config, tensors)
    packed = _packed(model)
    made = stack_single_experts(model, tensors, functools.partial(_scale, config))
    for parameter, (rank, scale) in made.items():
        config["target_parameters"] = [*(config.get("target_parameters") or []), parameter]
        _note_rank(config, parameter, rank, scale)
    parameters = _onto_parameters(model, config, tensors)
    targets = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
    if config.get("target_parameters"):
        stacks = {path for path, module in model.named_modules() if isinstance(module, Experts)}
        stacks |= {parameter.rpartition(".")[0] for parameter in parameters}
        targets = {path for path in targets if path.partition(".base_layer")[0] not in stacks}
    others = [name for name in config.get("target_parameters") or () if not _is_weight_of(name, targets)]
    for path, parts in packed.items():
        paths = {part: _beside(path, part) for part in parts}
        if targets & set(paths.values()):
            targets = targets - set(paths.values()) | {path}
            _pack(path, {paths[part]: rows for part, rows in parts.items()}, config, tensors)
    # Dense layers and shared experts that PEFT would take for stacks if they were among its modules.
    by_name = stacks_by_names(model, {path.rpartition(".")[2] for path in targets})[0]
    mistaken = {path for path in targets if path.rpartition(".")[2] in by_name}
    config["target_parameters"] = [*others, *sorted(f"{path}.weight" for path in mistaken)] or None
    config["target_modules"] = sorted(targets - mistaken)  # whole paths: no pattern finds a part by chance
    if (made or parameters or mistaken) and not is_trainable:
        config["lora_dropout"] = 0.0  # which adapters of parameters cannot have
    config["exclude_modules"] = None


def _is_weight_of(parameter: str, layers: Collection[str]) -> bool:
    """Whether a target parameter, a path or the end of one, is the weight of one of these layers."""
    stem, _, kind = parameter.rpartition(".")
    return kind == "weight" and any(f".{path}".endswith(f".{stem}") for path in layers)


def _refuse_names_of_experts(adapted: Any, adapter_name: str) -> None:
    """An adapter of dense layers or shared experts whose names mean stacks to PEFT would load elsewhere."""
    from liger_models.hf.adapters.expert_adapters import stacks_by_names

    model = adapted.get_base_model()
    for path, parts in _packed(model).items():
        has_adapter = adapter_name in getattr(model.get_submodule(path), "lora_A", ())
        if has_adapter and (taken := sorted(stacks_by_names(model, parts)[0])):
            raise CheckpointError(
                f"{path}: under the usual names ({', '.join(taken)}) PEFT would take this adapter for one of "
                f"the experts, in transformers' own {model.config.model_type} as here. Save it with "
                "model.save_pretrained(folder), which PeftModel.from_pretrained reads onto ours with "
                "projections packed, or merge it: model.merge_and_unload()"
            )


_KINDS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


def _pack(path: str, parts: Mapping[str, Tensor], config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Put the adapter of one packed projection in the place of those of its parts."""

    def take(part: str, kind: str) -> Tensor | None:
        return tensors.pop(f"base_model.model.{part}.{kind}", None)

    a, b, magnitude = ({part: take(part, kind) for part in parts} for kind in _KINDS)
    given = [part for part in parts if a[part] is not None and b[part] is not None]
    if half := [part for part in parts if (a[part] is None) != (b[part] is None)]:
        raise CheckpointError(f"{half[0]}: the adapter has one of lora_A and lora_B without the other")
    scales = {_scale(config, part) for part in given}
    if len(scales) > 1 or (config.get("use_dora") and len(given) < len(parts)):
        raise CheckpointError(
            f"{path}: the adapters of its parts {', '.join(parts)} have different scales, or DoRA adapts "
            "only some of them; call model.split_projections() and load the adapter with PEFT"
        )
    down = [tensor for part in given if (tensor := a[part]) is not None]
    shared = len(given) == len(parts) and all(torch.equal(tensor, down[0]) for tensor in down)
    packed_a = down[0] if shared else torch.cat(down)
    height, column = sum(map(len, parts.values())), 0
    packed_b = down[0].new_zeros(height, len(packed_a))
    for part, rows in parts.items():
        up = b[part]
        if up is not None:
            packed_b[rows, column : column + up.shape[1]] = up
            column += 0 if shared else up.shape[1]
    stem, rank = f"base_model.model.{path}", len(packed_a)
    tensors |= {f"{stem}.lora_A.weight": packed_a, f"{stem}.lora_B.weight": packed_b}
    sizes = {part: tensor for part, tensor in magnitude.items() if tensor is not None}
    if sizes:  # which DoRA gives to all parts or none
        packed = tensors[f"{stem}.lora_magnitude_vector"] = next(iter(sizes.values())).new_empty(height)
        for part, tensor in sizes.items():
            packed[parts[part]] = tensor
    (scale,) = scales
    _note_rank(config, path, rank, scale)


def _onto_parameters(model: Any, config: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """Put adapters of layers that are parameters of a module here onto these, which it names.

    Raises:
        CheckpointError: such an adapter has more than lora_A and lora_B.
    """
    found = []
    for layer, parameter in _layers_elsewhere(model, model.layouts).items():
        stem, home = (f"base_model.model.{path}." for path in (layer, parameter.rpartition(".")[0]))
        kinds = {name: name.removeprefix(stem) for name in tensors if name.startswith(stem)}
        if not kinds:
            continue
        if set(kinds.values()) != {"lora_A.weight", "lora_B.weight"} or config.get("use_dora"):
            raise CheckpointError(
                f"{layer} is no layer in our models, so its adapter can have lora_A and lora_B alone, and no "
                f"DoRA; found {', '.join(sorted(kinds.values()))}"
            )
        rank, scale = len(tensors[f"{stem}lora_A.weight"]), _scale(config, layer)
        for name, kind in kinds.items():
            tensors[home + kind] = tensors.pop(name)
        _note_rank(config, parameter, rank, scale)
        found.append(parameter)
    if found:
        config["target_parameters"] = [*(config.get("target_parameters") or []), *found]
    return found


def _onto_layers(model: Any, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The way back, for parameters whose names differ in transformers' own model."""
    for layer, parameter in _layers_elsewhere(model, model.layouts[-1:]).items():
        home = parameter.rpartition(".")[0]
        if home != layer and f"base_model.model.{home}.lora_A.weight" in tensors:
            for kind in ("lora_A.weight", "lora_B.weight"):
                tensor = tensors.pop(f"base_model.model.{home}.{kind}")
                tensors[f"base_model.model.{layer}.{kind}"] = tensor
            named = [*(config.get("target_parameters") or []), f"{layer}.weight"]
            config["target_parameters"] = [name for name in named if name != parameter]
            for pattern in ("rank_pattern", "alpha_pattern"):
                given = config.get(pattern) or {}
                if parameter in given:
                    given[f"{layer}.weight"] = given.pop(parameter)


def _layers_elsewhere(model: Any, layouts: Sequence[Layout]) -> dict[str, str]:
    """Matrices that are parameters of modules here, by the paths of layers that can have them elsewhere:
    routers.
    """
    found = {}
    modules = dict(model.named_modules())
    for layout in layouts:
        for name, expr in model.weight_map(layout).items():
            path, _, kind = name.rpartition(".")
            is_layer = isinstance(modules.get(path), nn.Linear | nn.Embedding) or path not in modules
            if kind == "weight" and isinstance(expr, Ref) and len(expr.shape) == 2 and not is_layer:
                found[expr.name.removesuffix(".weight")] = name
    return found


def _note_rank(config: dict[str, Any], path: str, rank: int, scale: float) -> None:
    """A rank of its own for one adapter, with the alpha that gives it this scale."""
    alpha = scale * (rank**0.5 if config.get("use_rslora") else rank)
    config["rank_pattern"] = {**(config.get("rank_pattern") or {}), path: rank}
    config["alpha_pattern"] = {**(config.get("alpha_pattern") or {}), path: alpha}


def _scale(config: Mapping[str, Any], path: str) -> float:
    """alpha / r of a layer, or alpha / sqrt(r)."""
    from peft.utils.other import get_pattern_key

    def of(pattern: str, default: Any) -> Any:
        found = config.get(pattern) or {}
        return found.get(get_pattern_key(list(found), path), default)

    rank = of("rank_pattern", config["r"])
    return of("alpha_pattern", config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)


def _with_usual_names(config: dict[str, Any], parts: Mapping[str, list[str]]) -> dict[str, Any]:
    """A config whose targets and patterns name the parts of packed projections."""

    def usual(name: str) -> list[str]:
        if name in (config.get("target_parameters") or ()):  # which are packed in other people's models too
            return [name]
        for packed, names in parts.items():
            if name == packed or name.endswith(f".{packed}"):
                return [name.removesuffix(packed) + part for part in names]
        return [name]

    for kind in ("target_modules", "exclude_modules"):
        targets = config.get(kind) or []
        if isinstance(targets, str):  # a pattern
            for packed, names in parts.items():
                targets = targets.replace(packed, f"({'|'.join(names)})")
            config[kind] = targets
        else:
            config[kind] = sorted({part for name in targets for part in usual(name)})
    parameters = {name.rpartition(".")[2] for name in config.get("target_parameters") or ()}
    for pattern in ("rank_pattern", "alpha_pattern"):
        given = config.get(pattern) or {}
        of_parameters = {name: n for name, n in given.items() if name.rpartition(".")[2] in parameters}
        config[pattern] = {part: n for name, n in given.items() for part in usual(name)} | of_parameters
    return config


def _packed(model: Any) -> dict[str, dict[str, Tensor]]:
    """The projections that are packed here alone, by their paths, and the rows of each layer that
    transformers' own model has in their place.
    """
    return packed_here_alone(model, model.weight_map(model.layouts[-1]))


def _beside(path: str, part: str) -> str:
    return f"{path.rpartition('.')[0]}.{part}"


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / TENSORS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
