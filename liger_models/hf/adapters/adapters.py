"""Saving and loading of PEFT's LoRA adapters on packed projections under the usual names. PEFT itself handles
the files of other adapters.

A packed projection is one layer with one adapter: W + s B A, with W = cat(W_q, W_k, W_v) by rows.

    packed -> usual:  each part gets A and its rows of B (and of DoRA's magnitude), in transformers' row
                      order. Exact.
    usual -> packed:  the inverse if the parts share A. Otherwise A is stacked and B block-diagonal, the rank
                      is the sum of the parts' ranks, and alpha keeps the scale s. Exact; a part without an
                      adapter has zeros.

Modules have transformers' names (module_names.py). Some routers are linear layers there and parameters here;
their adapters go on the parameter.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from liger_models.convert.checkpoints.expressions import Ref
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.errors import CheckpointError
from liger_models.convert.json_file import read_json
from liger_models.hf.checkpoints.module_names import by_path, to_split
from liger_models.layers.experts.moe import Experts
from liger_models.layers.projections.packed_linear import packed_here_alone
from liger_models.layers.vision.encoder import PatchEmbedding

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_adapter(model: Any, folder: str | Path, adapter_name: str = "default") -> None:
    """Write an adapter of a PeftModel as PEFT does, with packed projections split into the usual names.
    transformers' own model and any other reader of PEFT's files can load it.

    Raises:
        CheckpointError: a packed projection has an adapter other than LoRA or DoRA, or PEFT takes its usual
            names for stacked experts.
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
                    f"{name}: only {', '.join(_KINDS)} of a packed projection can be split; call "
                    "model.split_projections() before the adapter is made"
                )
            whole = tensors.pop(name)
            for part, rows in parts.items():
                tensor = whole.clone() if kind == "lora_A.weight" else whole[rows]
                tensors[f"base_model.model.{_sibling(path, part)}.{kind}"] = tensor
    if not _is_lora(config):
        return
    parts_by_name: dict[str, list[str]] = {}  # a layer may lack some
    for path, parts in packed.items():
        found = parts_by_name.setdefault(path.rpartition(".")[2], [])
        found += [part for part in parts if part not in found]
    paths = [path for path, _ in model.get_base_model().named_modules()]
    alike = {path for path in paths if path not in packed and path.rpartition(".")[2] in parts_by_name}
    _write(folder, _with_usual_names(config, parts_by_name, alike), tensors)


def load_adapter(model: nn.Module, folder: str | Path, **options: Any) -> Any:
    """Load an adapter with the usual names from a folder, for packed or split projections.

    Args:
        model: one of liger_models.hf.
        folder: written by PEFT or `save_adapter`.
        options: of `PeftModel.from_pretrained`, such as `is_trainable`.

    Returns:
        A PeftModel. Adapters of single experts (transformers 4) are stacked. Stacks cannot have dropout, so
        it is dropped unless the adapter is to be trained.

    Raises:
        TypeError: another model.
        CheckpointError: a packed projection or stack cannot represent the adapter, a tensor has no matching
            parameter, or unsloth wrote an expert adapter without stating its column order.
    """
    import peft

    if not hasattr(model, "layouts"):
        raise TypeError(
            f"load_adapter takes a model of liger_models.hf, found a {type(model).__module__}."
            f"{type(model).__name__}; liger_models.from_hub({str(folder)!r}) merges an adapter"
        )
    config = read_json(Path(folder) / CONFIG)
    tensors = load_file(Path(folder) / TENSORS)
    if _is_lora(config):
        _convert(model, config, tensors, bool(options.get("is_trainable")))
        with tempfile.TemporaryDirectory() as converted:
            _write(Path(converted), config, tensors)
            adapted = _adapted(model, converted, options)
    else:
        adapted = _adapted(model, folder, options)
    expected = peft.get_peft_model_state_dict(adapted, adapter_name=options.get("adapter_name", "default"))
    # Base weights, which PEFT adds to the files of an adapted head where a class names its head, are no part
    # of an adapter.
    needed = {key for key in expected if not key.endswith(".base_layer.weight")}
    if wrong := sorted((tensors.keys() - expected.keys()) | (needed - tensors.keys())):
        raise CheckpointError(f"{folder}: the adapter and the model differ in {wrong[:4]}")
    return adapted


def _adapted(model: Any, folder: str | Path, options: dict[str, Any]) -> Any:
    from peft import PeftModel

    from liger_models.hf.adapters.state_spaces import allowing_output_projections

    return allowing_output_projections(model, lambda: PeftModel.from_pretrained(model, folder, **options))


def _is_lora(config: Mapping[str, Any]) -> bool:
    return config.get("peft_type", "LORA") == "LORA"


def _convert(model: Any, config: dict[str, Any], tensors: dict[str, Tensor], is_trainable: bool) -> None:
    """Convert a LoRA adapter with the usual names to this model's modules."""
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
        paths = {part: _sibling(path, part) for part in parts}
        if targets & set(paths.values()):
            targets = targets - set(paths.values()) | {path}
            _pack(path, {paths[part]: rows for part, rows in parts.items()}, config, tensors)
    for path in sorted(targets):
        if isinstance(by_path(model, path), PatchEmbedding):
            raise CheckpointError(
                f"{path}: the adapter covers the patch embedding, which takes no adapter here; merge it into "
                "transformers' own model, and load the result"
            )
    # Dense layers and shared experts whose names PEFT would take for stacked experts.
    by_name = stacks_by_names(model, {path.rpartition(".")[2] for path in targets})[0]
    mistaken = {path for path in targets if path.rpartition(".")[2] in by_name}
    config["target_parameters"] = [*others, *sorted(f"{path}.weight" for path in mistaken)] or None
    config["target_modules"] = sorted(targets - mistaken)  # whole paths: no pattern finds a part by chance
    if (made or parameters or mistaken) and not is_trainable:
        config["lora_dropout"] = 0.0  # adapters of parameters have none
    config["exclude_modules"] = None


def _is_weight_of(parameter: str, layers: Collection[str]) -> bool:
    """Return whether a target parameter, a full path or a suffix, is the weight of one of these layers."""
    stem, _, kind = parameter.rpartition(".")
    return kind == "weight" and any(f".{path}".endswith(f".{stem}") for path in layers)


def _refuse_names_of_experts(adapted: Any, adapter_name: str) -> None:
    """Refuse adapters of dense layers or shared experts that PEFT would load onto stacked experts."""
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
    """Replace the adapters of the parts by one of the packed projection."""

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
    if sizes:  # DoRA: all parts or none
        packed = tensors[f"{stem}.lora_magnitude_vector"] = next(iter(sizes.values())).new_empty(height)
        for part, tensor in sizes.items():
            packed[parts[part]] = tensor
    (scale,) = scales
    _note_rank(config, path, rank, scale)


def _onto_parameters(model: Any, config: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """Move adapters of layers that are parameters here onto these parameters, and return their names.

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
                f"{layer} is no layer in our models, so its adapter can have only lora_A and lora_B, and no "
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
    """Undo `_onto_parameters`, for parameters with other names in transformers' own model."""
    for layer, parameter in _layers_elsewhere(model, [model.architecture.modules_layout]).items():
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
    """Map layer paths in transformers' own model to matrices that are parameters here, such as routers."""
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
    """Record one adapter's own rank, and the alpha that gives it this scale."""
    alpha = scale * (rank**0.5 if config.get("use_rslora") else rank)
    config["rank_pattern"] = {**(config.get("rank_pattern") or {}), path: rank}
    config["alpha_pattern"] = {**(config.get("alpha_pattern") or {}), path: alpha}


def _scale(config: Mapping[str, Any], path: str) -> float:
    """Scale of a layer's adapter: alpha / r, or alpha / sqrt(r)."""
    from peft.utils.other import get_pattern_key

    def of(pattern: str, default: Any) -> Any:
        found = config.get(pattern) or {}
        return found.get(get_pattern_key(list(found), path), default)

    rank = of("rank_pattern", config["r"])
    return of("alpha_pattern", config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)


def _with_usual_names(
    config: dict[str, Any], parts: Mapping[str, list[str]], alike: Collection[str]
) -> dict[str, Any]:
    """Return a config whose targets and patterns name the parts of packed projections. Layers at the paths
    `alike` have the name of one, and are not packed.
    """

    def usual(name: str) -> list[str]:
        if name in (config.get("target_parameters") or ()) or name in alike:  # transformers has these too
            return [name]
        for packed, names in parts.items():
            if name == packed or name.endswith(f".{packed}"):
                both = [name] if any(path.endswith(f".{name}") for path in alike) else []
                return [name.removesuffix(packed) + part for part in names] + both
        return [name]

    for kind in ("target_modules", "exclude_modules"):
        targets = config.get(kind) or []
        if isinstance(targets, str):  # a pattern
            for packed, names in parts.items():
                own = [packed] if any(path.endswith(f".{packed}") for path in alike) else []
                targets = targets.replace(packed, f"({'|'.join(names + own)})")
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
    """Return the projections that only our model packs, by path, with the rows of each part."""
    return packed_here_alone(model, to_split(model))


def _sibling(path: str, part: str) -> str:
    return f"{path.rpartition('.')[0]}.{part}"


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / TENSORS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def check_loaded(loaded: Any, before: Set[str], name: str, source: str) -> None:
    """Check the report of transformers' loader of adapters.

    Args:
        before: the model's parameters before.
        name: of the adapter.
        source: its origin, for messages.

    Raises:
        CheckpointError: a tensor of the adapter has no matching parameter.
    """
    # Names that only contain the adapter's, such as "proj_for_vision", are among the missing ones, too.
    missing = (path for path in loaded.missing_keys if path not in before or name in path.split("."))
    if wrong := sorted({*loaded.unexpected_keys, *missing}):
        raise CheckpointError(
            f"{source}: the adapter and the model differ in {wrong[:4]}; make the model as it was when the "
            "adapter was trained (projections split or not), or use liger_models.hf.load_adapter"
        )
