"""Linear layers with 4-bit or 8-bit weights, by bitsandbytes.

    nf4:  blocks of 64 weights with a scale each, the scales in 8 bits (Dettmers et al., 2023,
          arXiv:2305.14314); the product uses the dequantised weights
    int8: rows with a scale each; input and weights are multiplied as integers, except for columns of
          outliers (Dettmers et al., 2022, arXiv:2208.07339)

These are the layers of transformers' `BitsAndBytesConfig`, block for block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from liger_models.convert.errors import ConfigError
from liger_models.layers.projections.ternary import is_ternary

METHODS = ("nf4", "int8")


@torch.no_grad()
def quantise(model: nn.Module, method: str, device: torch.device, to_host: bool = False) -> None:
    """Quantise every linear layer of a model except its head, one by one, and move the model to a device.
    Other modules (embeddings, norms, routers, stacked experts) keep their dtype.

    Args:
        model: with separate layers to quantise (split projections).
        method: "nf4" or "int8".
        device: target device. The unquantised model only needs memory where it is now.
        to_host: keep the weights in host memory (only nf4), for the model's `keep_weights_on_host`.

    Raises:
        ConfigError: bitsandbytes is not installed, or the model rounds its weights itself.
    """
    bnb = _import_bitsandbytes()
    if any(map(is_ternary, model.modules())):
        raise ConfigError(
            f"quantize is {method!r}, but this model rounds its weights to three values "
            "(quantization_config), which layers in another form would not; omit it"
        )
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path != "lm_head":
            new: Any = _quantised(bnb, module, method, device)
            model.set_submodule(path, new)
            if to_host:
                new.weight.data = new.weight.data.cpu()
    if not to_host:
        model.to(device)
    # As transformers marks its models, so that PEFT recognises the layers.
    setattr(model, "is_loaded_in_4bit" if method == "nf4" else "is_loaded_in_8bit", True)


def dequantised(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Plain linear layer with the dequantised weights of a quantised one; other layers unchanged."""
    weight: Any = layer.weight
    if type(weight).__name__ not in ("Params4bit", "Int8Params"):
        return layer
    bnb = _import_bitsandbytes()
    if isinstance(weight, bnb.nn.Params4bit):
        dense = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    else:
        scales = layer.state.SCB if weight.SCB is None else weight.SCB  # type: ignore[union-attr]
        data = weight.data if layer.state.CB is None else layer.state.CB  # type: ignore[union-attr]
        dense = bnb.functional.int8_vectorwise_dequant(data, scales)
    plain = nn.Linear(dense.shape[1], dense.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(dense.to(dtype), requires_grad=False)
    plain.register_parameter("bias", layer.bias)  # type: ignore[arg-type]
    return plain


def _quantised(bnb: Any, layer: nn.Linear, method: str, device: torch.device) -> nn.Module:
    sizes = layer.in_features, layer.out_features, layer.bias is not None
    with torch.device("meta"):
        if method == "nf4":
            new = bnb.nn.Linear4bit(*sizes, compute_dtype=layer.weight.dtype, quant_type="nf4")
        else:
            new = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
    weight = layer.weight.detach()
    if method == "nf4":
        new.weight = bnb.nn.Params4bit(weight, False, quant_type="nf4", module=new).to(device)
    else:
        new.weight = bnb.nn.Int8Params(weight.cpu(), False, has_fp16_weights=False).to(device)
    if layer.bias is not None:
        new.bias = nn.Parameter(layer.bias.detach().to(device), requires_grad=False)
    return new.train(layer.training)


def _import_bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError("--quantize needs bitsandbytes: pip install 'liger_models[quantize]'") from error
    return bitsandbytes
