"""Which parameters of a model are matrices."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def matrices(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the matrices of a model, stacked ones included, each with its module and its name there. A module
    names parameters with several dimensions that are vectors, one per head, expert or channel, in
    `stacked_vectors`.
    """
    for module in model.modules():
        vectors = getattr(module, "stacked_vectors", ())
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2 and name not in vectors:
                yield module, name, parameter
