"""Which parameters are matrices."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def matrices(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The matrices of a model, each with its module and its name there; stacked ones too. A module whose
    parameters of several dimensions are vectors, one for each head, expert or channel, names them in
    `stacked_vectors`.
    """
    for module in model.modules():
        vectors = getattr(module, "stacked_vectors", ())
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2 and name not in vectors:
                yield module, name, parameter
