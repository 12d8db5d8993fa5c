"""The layers of a model that get low-rank adapters in a training run."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from liger_models.convert.checkpoints.adapter_forms import AdapterLayers, adapter_layers
from liger_models.convert.errors import ConfigError
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.training.adapters.lora_settings import ALL, LoraSettings


def find_targets(
    model: LigerCausalLM, settings: LoraSettings, frozen: Collection[str]
) -> tuple[dict[str, AdapterLayers], set[str]]:
    """Return (the native layers to adapt, as layers of transformers' own model; those to pass as parameters).

    A tied head is excluded, since an adapter would untie it, and so are frozen parts and modules with
    `untrained`, which no loss reaches. Prediction modules are adapted only by targets that fit nothing else.
    Those passed as parameters are dense MLPs and shared experts whose names PEFT would take for stacked
    experts among its target modules.
    """
    layers, left_out = _adaptable(model, frozen)
    decoder = {path: own for path, own in layers.items() if not path.startswith("mtp.")}
    if settings.targets == ALL:
        layers = decoder
    if not layers:
        raise ConfigError("lora: no linear layer is left to adapt; freeze fewer layers")
    from liger_models.hf.adapters.expert_adapters import stacks_by_names

    stacks = stacks_by_names(model, {leaf(name) for own in layers.values() for name in own.rows})[0]
    parameters = {path for path, own in layers.items() if any(leaf(name) in stacks for name in own.rows)}
    for path in sorted(parameters):
        if _is_no_parameter_of_peft(model, path, settings):
            left_out[path] = _ONLY_AS_PARAMETERS
    if settings.targets == ALL:
        chosen = {path for path in layers if path not in left_out and path != "lm_head"}
        _warn_of(left_out)
    else:
        chosen = _named(model, settings.targets, layers, decoder.keys(), left_out)
    return {path: own for path, own in layers.items() if path in chosen}, parameters & chosen


def _adaptable(
    model: LigerCausalLM, frozen: Collection[str]
) -> tuple[dict[str, AdapterLayers], dict[str, str]]:
    """Return the linear layers that are rows of transformers' own, and why the others are not, by path."""
    weight_map = model.weight_map(model.modules_layout)
    found: dict[str, AdapterLayers] = {}
    left_out: dict[str, str] = {}
    untrained: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if getattr(module, "untrained", False):
            untrained += (f"{path}.",)
        if getattr(module, "is_shared", False):
            shared += (f"{path}.",)
        expr = weight_map.get(f"{path}.weight") if isinstance(module, nn.Linear) else None
        if expr is None or path.startswith(untrained) or path in frozen:
            continue
        own: AdapterLayers | str
        if getattr(module, "passes_adapters", False):
            own = _PASSED_OVER
        else:
            own = _SHARED if path.startswith(shared) else adapter_layers(expr)
        if isinstance(own, str):
            left_out[path] = own
        else:
            found[path] = own
    return found, left_out


def _warn_of(left_out: Mapping[str, str]) -> None:
    """Warn of layers without adapters, for each reason."""
    for reason in dict.fromkeys(left_out.values()):
        paths = [path for path, why in left_out.items() if why == reason]
        warnings.warn(f"{len(paths)} layers ({paths[0]}, ...) get no adapter: {reason}", stacklevel=5)


def _named(
    model: LigerCausalLM,
    targets: str,
    layers: Mapping[str, AdapterLayers],
    decoder: Collection[str],
    left_out: Mapping[str, str],
) -> set[str]:
    """Return the layers that the targets name, as the checkpoint does or as transformers' own model.

    Raises:
        ConfigError: a target names no layer, only such as cannot be adapted, or only a part of one.
    """
    weight_map = model.weight_map()
    stored = {
        path: [ref.name.removesuffix(".weight") for ref in weight_map[f"{path}.weight"].refs()]
        for path in [*layers, *left_out]
    }
    wanted = [target for target in targets.split("+") if target] or [""]
    hits: dict[str, set[str]] = {}
    for target in wanted:
        fitting = {
            path: found
            for path, names in stored.items()
            if (found := _ending(target, {*names, *(layers[path].rows if path in layers else ())}))
        }
        passed = {path: left_out[path] for path in fitting if path not in layers}
        if len(passed) < len(fitting):
            _warn_of(passed)
            fitting = {path: found for path, found in fitting.items() if path in layers}
        fitting = {path: found for path, found in fitting.items() if path in decoder} or fitting
        if not fitting or not target:
            ends = sorted({leaf(name) for path in layers for name in stored[path]})
            raise ConfigError(
                f"targets={targets}: no linear layer is called {target!r}; this model has "
                f"{', '.join(ends)}, or give {ALL}"
            )
        for path, found in fitting.items():
            if path in left_out:
                raise ConfigError(f"targets={targets}: {path} cannot have this adapter: {left_out[path]}")
            hits[path] = hits.get(path, set()) | found
    for path, found in hits.items():
        if not found >= {*layers[path].rows} and not found & {*stored[path]}:
            raise ConfigError(
                f"targets={targets}: {path} is one layer here, and in transformers "
                f"{', '.join(layers[path].rows)}; name all of them, or none"
            )
    return hits.keys() & layers.keys()


def _ending(target: str, names: Collection[str]) -> set[str]:
    return {name for name in names if f".{name}".endswith(f".{target}")}


def target_names(model: LigerCausalLM, names: Collection[str]) -> list[str]:
    """Return target modules for PEFT that fit exactly these layers of transformers' own model: last parts of
    names where no other module ends alike, else whole names, as in all multimodal models, since encoders have
    modules in transformers that no layer here reads.
    """
    of_model = {
        name.rpartition(".")[0]
        for expr in model.weight_map(model.modules_layout).values()
        for name in (ref.name for ref in expr.refs())
    }
    paths = {path[:end] for path in of_model for end in _ends(path)}
    others = {leaf(path) for path in paths.difference(names)}
    whole = model.architecture.multimodal
    return sorted({name if whole or leaf(name) in others else leaf(name) for name in names})


def _ends(path: str) -> list[int]:
    """Where a path and its parents end."""
    return [i for i, letter in enumerate(path) if letter == "."] + [len(path)]


def find_tables(model: LigerCausalLM, adapted: Collection[str], frozen: Collection[str]) -> dict[str, Any]:
    """The embedding, and a language model's own head, by their names in transformers' own model.

    Raises:
        ConfigError: their rows cannot be trained below adapters.
    """
    weight_map = model.weight_map(model.modules_layout)
    own = model.tables_of_vocabulary
    tables = own[:1] if model.spec.tie_word_embeddings else own
    if taken := [table for table in tables if table in adapted or table in frozen]:
        raise ConfigError(
            f"add_tokens trains rows of {taken[0]}, which is frozen or has an adapter; leave it out of both"
        )
    if model.spec.head_bias:
        raise ConfigError(
            "add_tokens with lora needs a head without a bias, which PEFT leaves out of a head with trained "
            "rows; train all weights (omit lora)"
        )
    names = {table: next(weight_map[f"{table}.weight"].refs()).name for table in tables}
    return {name.removesuffix(".weight"): model.get_submodule(table) for table, name in names.items()}


def _is_no_parameter_of_peft(model: LigerCausalLM, path: str, settings: LoraSettings) -> bool:
    """Return whether PEFT cannot load this layer's adapter as a parameter adapter."""
    quantised = type(model.get_submodule(path).weight) is not nn.Parameter
    return bool(settings.dropout) or settings.dora or quantised


def leaf(name: str) -> str:
    return name.rpartition(".")[2]


_PASSED_OVER = "transformers multiplies by their weights without calling them, and passes over an adapter"
_SHARED = "several layers share their weights, and PEFT would give each of these an adapter of its own"
_ONLY_AS_PARAMETERS = (
    "in models of this type PEFT takes that name for stacks of experts, so such layers can be adapted only "
    "as parameters, which PEFT does without dropout, without DoRA and on weights that are not quantised"
)
