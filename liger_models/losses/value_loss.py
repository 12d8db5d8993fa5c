"""PPO's value loss (Schulman et al., 2017, arXiv:1707.06347, eq. 9), with values clipped around the old ones
as in OpenAI's RLHF code (Stiennon et al., 2020, arXiv:2009.01325; Huang et al., 2024, arXiv:2403.17031):

    loss = 1/2 mean over tokens of max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.losses.rows import check_tokens


def value_loss(
    values: Tensor,
    returns: Tensor,
    counted: Tensor,
    old_values: Tensor | None = None,
    *,
    clip: float = 0.2,
    num_items: Tensor | int | float | None = None,
) -> Tensor:
    """Loss of values [N, seq], a scalar, over the tokens `counted` [N, seq] of this call or over `num_items`.

    returns and old_values [N, seq] have no gradient; without old values nothing is clipped.

    Raises:
        ValueError: incompatible shapes.
    """
    check_tokens(values, returns=returns, counted=counted, old_values=old_values)
    errors = (values - returns.detach()) ** 2
    if old_values is not None:
        old = old_values.detach()
        bounded = torch.minimum(torch.maximum(values, old - clip), old + clip)
        errors = torch.maximum(errors, (bounded - returns.detach()) ** 2)
    total = counted.sum().clamp(min=1) if num_items is None else num_items
    return 0.5 * (errors * counted).sum() / total
