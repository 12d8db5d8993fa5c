"""Every way of choosing and weighting experts, and functions that run one."""

import pytest
import torch

EVERY_FORM = {
    "renormalized softmax": {},
    "softmax": {"renormalize": False, "scale": 2.5},
    "biased softmax": {"correction_bias": True},
    "softmax of the chosen": {"softmax_after_top_k": True, "scale": 0.5},
    "biased softmax of the chosen": {"softmax_after_top_k": True, "correction_bias": True},
    "renormalized sigmoid": {"score": "sigmoid"},
    "biased sigmoid": {"score": "sigmoid", "correction_bias": True, "renormalize": False, "scale": 2.5},
    "biased root of a softplus": {"score": "sqrt_softplus", "correction_bias": True, "scale": 1.5},
    "biased renormalized sigmoid": {"score": "sigmoid", "correction_bias": True, "scale": 2.5},
}
IN_GROUPS = {
    "DeepSeek-V3": {
        "score": "sigmoid",
        "correction_bias": True,
        "num_groups": 8,
        "top_groups": 4,
        "scale": 2.5,
    },
    "DeepSeek-V2": {
        "renormalize": False,
        "num_groups": 8,
        "top_groups": 3,
        "group_score": "max",
        "scale": 16.0,
    },
    "renormalized softmax": {"num_groups": 4, "top_groups": 1},
}
every_form = pytest.mark.parametrize("options", EVERY_FORM.values(), ids=EVERY_FORM)


def with_bias(options, num_experts, device="cpu"):
    if "correction_bias" not in options:
        return options
    return {**options, "correction_bias": torch.randn(num_experts, device=device) / num_experts}


def routed(function, logits, top_k, options, upstream=None):
    """Weights, the gradient of the logits, experts, and the upstream gradient."""
    weights, experts = function(logits, top_k, **options)
    upstream = torch.randn_like(weights) if upstream is None else upstream.to(weights.dtype)
    return weights, *torch.autograd.grad(weights, logits, upstream), experts, upstream


def in_float64(x):
    return x.detach().double().requires_grad_()
