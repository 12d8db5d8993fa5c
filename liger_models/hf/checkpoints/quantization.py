"""Quantised models: bitsandbytes, torchao and BitNet layers in the same places as in transformers' own
models.

Before weights are read, transformers replaces modules whose class is exactly `torch.nn.Linear`, and quantises
each weight as it is loaded. A model to be quantised therefore has one such layer for each in transformers'
own model. 4-bit blocks and their statistics are then equal (double quantisation averages over a whole layer),
and so are saved files. Stacked experts are not linear layers in either library and are not quantised; nor is
the head, unless `llm_int8_skip_modules` omits it. Routers are not linear layers here and keep their dtype:
transformers quantises those of Gemma 4 and Hunyuan, and `from_hub` reads such files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.quantizers.quantizers_utils import should_convert_module

from liger_models.convert.errors import ConfigError
from liger_models.layers.experts.router import Router
from liger_models.layers.model.head import LMHead
from liger_models.layers.projections.in_place import change_class
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import packed_here_alone

METHODS = ("bitsandbytes", "torchao", "bitnet")


def is_quantised(config: Any) -> bool:
    """Return whether a config asks for quantisation or describes a quantised checkpoint."""
    return getattr(config, "quantization_config", None) is not None


def give_layers_to_quantise(model: Any) -> None:
    """Replace the linear layers of a new model with torch's own.

    Raises:
        ConfigError: the method is neither bitsandbytes nor torchao, or packed projections are requested where
            the checkpoint has separate ones.
    """
    settings = model.config.quantization_config
    method = _setting(settings, "quant_method")
    method = getattr(method, "value", method)
    if method not in METHODS and not any(_setting(settings, f"load_in_{n}bit") for n in (4, 8)):
        raise ConfigError(
            f"quantization_config asks for {method!r}, but our models support only "
            f"{' and '.join(METHODS)}. Call liger_models.hf.unregister() to load transformers' own model"
        )
    weight_map = model.weight_map()
    packed = packed_here_alone(model, weight_map)
    if parts := [path for path, layers in packed.items() if len(layers) > 1]:
        raise ConfigError(
            f"{parts[0]} packs layers that a quantised checkpoint stores one by one "
            f"({', '.join(packed[parts[0]])}), so its quantisation blocks and its files would differ from "
            "those of transformers' own model. Call "
            'liger_models.hf.register(projections="split") before from_pretrained'
        )
    model.split_projections()  # projections packed in checkpoints too become plain layers
    skipped = _setting(settings, "llm_int8_skip_modules") or _setting(settings, "modules_to_not_convert")
    # As transformers, which by default leaves tied weights as they are.
    whole = model.base_decoder.shared_modules() if skipped is None else ()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module not in whole:
            goes = type(module) is LMHead and skipped is not None and should_convert_module(path, skipped)
            if goes or type(module) is Linear:
                change_class(module, nn.Linear)


QUANTISED_ROUTERS = (
    "routers that transformers quantised (Gemma 4, Hunyuan) are no linear layers here. Load the checkpoint "
    "with liger_models.from_hub, or quantise it again with the routers in llm_int8_skip_modules"
)


def refuse_quantised_routers(model: Any) -> None:
    """Raise if a loaded router's weight is in the form of a quantised layer, which some releases of
    transformers read as it is.

    Raises:
        RuntimeError: it names the router.
    """
    for path, module in model.named_modules():
        if isinstance(module, Router):
            weight, rows = module.weight, module.spec.num_logits
            if len(weight) != rows or not weight.is_floating_point():
                raise RuntimeError(
                    f"{path}.weight has the shape {tuple(weight.shape)} and the dtype {weight.dtype}, "
                    f"expected floating-point numbers in {rows} rows: {QUANTISED_ROUTERS}"
                )


def _setting(settings: Any, name: str) -> Any:
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)
