"""The layers of a model that get low-rank adapters in a training run."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from liger_models.convert.checkpoints.expressions import Ref
from liger_models.convert.errors import ConfigError
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.training.adapters.lora_settings import ALL, LoraSettings


def find_targets(
    model: LigerCausalLM, settings: LoraSettings, frozen: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return (native name -> checkpoint name of the layers to adapt, the subset to pass as parameters).

    A tied head is excluded, since an adapter would untie it, and so are frozen parts, modules with
    `untrained`, which no loss reaches, and layers with `passes_adapters`. Prediction modules are adapted only
    by targets that fit nothing else. The subset are dense MLPs and shared experts whose names PEFT would take
    for stacked experts among its target modules.
    """
    weight_map = model.weight_map()
    named: dict[str, str] = {}
    rearranged: list[str] = []
    untrained: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if getattr(module, "untrained", False):
            untrained += (f"{path}.",)
        expr = weight_map.get(f"{path}.weight") if isinstance(module, nn.Linear) else None
        passed = getattr(module, "passes_adapters", False)
        if expr is None or path.startswith(untrained) or passed:
            continue
        if isinstance(expr, Ref):
            named[path] = expr.name.removesuffix(".weight")
        elif path not in frozen:
            rearranged.append(path)
    named = {path: name for path, name in named.items() if path not in frozen}
    decoder = {path: name for path, name in named.items() if not path.startswith("mtp.")}
    if settings.targets == ALL:
        named = decoder
    if not named:
        raise ConfigError("lora: no linear layer is left to adapt; freeze fewer layers")
    from liger_models.hf.adapters.expert_adapters import stacks_by_names

    stacks = stacks_by_names(model, {leaf(name) for name in named.values()})[0]
    parameters = {path: name for path, name in named.items() if leaf(name) in stacks}
    refused = [path for path in parameters if _is_no_parameter_of_peft(model, path, settings)]
    if settings.targets == ALL:
        if rearranged:
            warnings.warn(
                f"{len(rearranged)} layers ({rearranged[0]}, ...) get no adapter: this checkpoint stores "
                "their weights in parts or in another order, where an adapter would have no name",
                stacklevel=4,
            )
        if refused:
            warnings.warn(
                f"{len(refused)} layers ({refused[0]}, ...) get no adapter: {_ONLY_AS_PARAMETERS}",
                stacklevel=4,
            )
        named = {path: name for path, name in named.items() if path not in refused and path != "lm_head"}
        return named, {path: name for path, name in parameters.items() if path in named}
    wanted = [target for target in settings.targets.split("+") if target]
    chosen: dict[str, str] = {}
    for target in wanted or [""]:
        fitting = {path: name for path, name in named.items() if f".{name}".endswith(f".{target}")}
        fitting = {path: name for path, name in fitting.items() if path in decoder} or fitting
        if not fitting or not target:
            ends = sorted({leaf(name) for name in named.values()})
            raise ConfigError(
                f"targets={settings.targets}: no linear layer is called {target!r}; this model has "
                f"{', '.join(ends)}, or give {ALL}"
            )
        if taken := [path for path in fitting if path in refused]:
            raise ConfigError(
                f"targets={settings.targets}: {taken[0]} cannot have this adapter: {_ONLY_AS_PARAMETERS}"
            )
        chosen |= fitting
    named = {path: name for path, name in named.items() if path in chosen}
    return named, {path: name for path, name in parameters.items() if path in named}


def find_tables(model: LigerCausalLM, adapted: Collection[str], frozen: Collection[str]) -> dict[str, Any]:
    """The embedding, and a language model's own head, by their names in the checkpoint.

    Raises:
        ConfigError: their rows cannot be trained below adapters.
    """
    weight_map = model.weight_map()
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


def stated_targets(targets: str, whole: Mapping[str, str]) -> list[str]:
    """Return the target patterns of the layers passed to PEFT as modules."""
    last = {leaf(name) for name in whole.values()}
    return [target for target in targets.split("+") if leaf(target) in last]


def leaf(name: str) -> str:
    return name.rpartition(".")[2]


_ONLY_AS_PARAMETERS = (
    "in models of this type PEFT takes that name for stacks of experts, so such layers can be adapted only "
    "as parameters, which PEFT does without dropout, without DoRA and on weights that are not quantised"
)
