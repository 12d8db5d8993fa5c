"""Quantised models: bitsandbytes and torchao in the places where they stand in transformers' own models.

transformers puts quantised layers in the place of what is exactly torch's linear layer, before a weight is
read, and quantises each weight as it comes from the checkpoint. So a model that is to be quantised consists
of such layers, one for each that transformers' own model has. Blocks of 4 bits and their statistics, of which
double quantisation takes means over a whole layer, are then the same, and so are saved files. Stacked experts
and their routers are no linear layers, there and here, and stay as they are; so does the head, unless
`llm_int8_skip_modules` is given without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.quantizers_utils import should_convert_module

from liger_models.convert.checkpoints.weight_map import Expr, Ref
from liger_models.convert.errors import ConfigError
from liger_models.layers.head import LMHead
from liger_models.layers.linear import Linear
from liger_models.layers.packed_linear import packed_weights

METHODS = ("bitsandbytes", "torchao")


def is_quantised(config: Any) -> bool:
    """Whether transformers is about to quantise a model of this config, or it was saved quantised."""
    return getattr(config, "quantization_config", None) is not None


def give_layers_to_quantise(model: Any) -> None:
    """Let a model that was just made consist of torch's own linear layers.

    Raises:
        ConfigError: another method than bitsandbytes and torchao; packed projections of what the checkpoint
            has in parts; modules to skip that are called otherwise here.
    """
    settings = model.config.quantization_config
    method = _setting(settings, "quant_method")
    method = getattr(method, "value", method)
    if method not in METHODS and not any(_setting(settings, f"load_in_{n}bit") for n in (4, 8)):
        raise ConfigError(
            f"quantization_config is of {method!r}; of the ways to quantise our models run with "
            f"{' and '.join(METHODS)}. Call liger_models.hf.unregister() to load transformers' own model"
        )
    weight_map = model.weight_map()
    if packed := packed_weights(model, weight_map)[0]:
        raise ConfigError(
            f"{packed[0]} packs what a quantised checkpoint has as layers of their own "
            f"({', '.join(ref.name for ref in weight_map[packed[0]].refs())}): its blocks and its files "
            "would not be those of transformers' own model. Call "
            'liger_models.hf.register(projections="split") before from_pretrained'
        )
    model.split_projections()  # what is packed in the checkpoint too becomes a layer like the others
    skipped = _setting(settings, "llm_int8_skip_modules") or _setting(settings, "modules_to_not_convert")
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            _check_name(path, weight_map, skipped)
            goes = type(module) is LMHead and skipped is not None and should_convert_module(path, skipped)
            if goes or type(module) is Linear:
                module.__class__ = nn.Linear


class QuantisedNames(WeightRenaming):
    """Layers that a checkpoint calls otherwise, with all that belongs to a quantised weight: `weight.absmax`,
    `weight.quant_state.bitsandbytes__nf4`, `SCB`.

    Args:
        names: of layers, from the checkpoint's to the model's.
    """

    __slots__ = ("names",)

    def __init__(self, names: Mapping[str, str]):
        super().__init__(["liger_models"], ["liger_models"])  # patterns of no name: it has a table
        self.names = dict(names)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """(the name of the other side, what stands for this entry if it is another)."""
        for prefix in ("", "model."):  # in front of a base model's names in a checkpoint of the whole
            layer, rest = source_key.removeprefix(prefix), ""
            while layer:
                if layer in self.names:
                    self._was_used = True
                    found = source_key[: len(source_key) - len(layer + rest)] + self.names[layer] + rest
                    return found, self.source_patterns[0]
                layer, point, last = layer.rpartition(".")
                rest = point + last + rest
        return source_key, None

    def reverse_transform(self) -> QuantisedNames:
        return QuantisedNames({ours: theirs for theirs, ours in self.names.items()})

    def __deepcopy__(self, memo: object) -> QuantisedNames:
        return self


def renamed_layers(model: nn.Module, weight_map: Mapping[str, Expr]) -> dict[str, str]:
    """The linear layers that a checkpoint calls otherwise, from its names to the model's."""
    renamed = {}
    for path, module in model.named_modules():
        expr = weight_map.get(f"{path}.weight")
        if isinstance(module, nn.Linear) and isinstance(expr, Ref) and expr.name != f"{path}.weight":
            renamed[expr.name.removesuffix(".weight")] = path
    return renamed


def _check_name(path: str, weight_map: Mapping[str, Expr], skipped: list[str] | None) -> None:
    expr = weight_map.get(f"{path}.weight")
    theirs = expr.name.removesuffix(".weight") if isinstance(expr, Ref) else path
    if skipped is not None and should_convert_module(path, skipped) != should_convert_module(theirs, skipped):
        raise ConfigError(
            f"{theirs} in the checkpoint is {path} here, and the list of modules not to quantise, {skipped}, "
            "names only one of them; name both"
        )


def _setting(settings: Any, name: str) -> Any:
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)
