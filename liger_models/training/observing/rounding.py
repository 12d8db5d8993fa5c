"""The distance of decoded weights from those that a quantised checkpoint publishes."""

from __future__ import annotations

import math

import torch

from liger_models.convert.quantised.reader import ModelReader, quantised_weights
from liger_models.models.causal_lm import LigerCausalLM

WEIGHTS, ELEMENTS = 16, 2**18  # how many weights are compared, and how much of each


def describe_rounding(model: LigerCausalLM) -> str | None:
    """Describe the distance of a model's trained weights from the quantised weights that they were decoded
    from, due to rounding to the model's dtype; None if none were quantised.
    """
    if model.source_folder is None:
        return None
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    used = {ref.name for name, expr in model.weight_map().items() if name in trained for ref in expr.refs()}
    with ModelReader(model.source_folder) as reader:
        weights = quantised_weights(reader.tensors)
        names = sorted(used & weights.keys())
        if reader.quantisation is None or not names:
            return None
        method, chosen = reader.quantisation.method, names[:: -(-len(names) // WEIGHTS)]
        error = square = 0.0
        for name in chosen:
            count = min(ELEMENTS, math.prod(weights[name].shape))
            exact = torch.empty(count, device="cpu")
            reader.read_into(name, exact, 0, count)
            error += (exact.to(model.dtype).double() - exact.double()).square().sum().item()
            square += exact.double().square().sum().item()
    dtype = str(model.dtype).removeprefix("torch.")
    begin = f"training starts from the {method} weights decoded to {dtype}"
    if error == 0:
        return f"{begin}, which holds them exactly"
    return (
        f"{begin}: a {dtype} export will be {math.sqrt(error / square):.2%} (root mean square of "
        f"{len(chosen)} weights) from what was published, besides what training changes; with --quantization "
        "as_loaded, tensors that did not change keep the published bits"
    )
