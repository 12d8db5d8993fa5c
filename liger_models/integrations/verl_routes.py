"""Router replay in verl's engine of ours (verl.py): R2, experts of the pass that gave the old
log-probabilities, and R3, the experts of the rollout. A reference routes by itself, as in verl's own engines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.convert.errors import DataError


def routing_of(batch: Any, mode: str, forward_only: bool) -> dict[str, Any]:
    """Keywords of `model.score` that replay or record a micro-batch's experts.

    Raises:
        DataError: there are none to replay.
    """
    if mode == "disabled":
        return {}
    routed = batch.get("routed_experts", None)
    if routed is not None:
        return {"routed_experts": _aligned(routed, batch["input_ids"].offsets())[None]}
    if mode == "R2" and forward_only:
        return {"output_routed_experts": True}
    raise DataError(
        f"router_replay.mode={mode}: the batch has no routed_experts; the rollout must return them"
    )


def _aligned(routed: Tensor, bounds: Tensor) -> Tensor:
    """Jagged experts of sequences, or of all their tokens but the last, as [tokens, layers, top_k].

    No engine reads a last token, and rows that repeat an expert, such as zeros, were not recorded: the model
    then routes by itself.
    """
    rows = []
    for own, length in zip(routed.unbind(), bounds.diff().tolist(), strict=True):
        if len(own) not in (length, length - 1):
            raise DataError(
                f"routed_experts has {len(own)} rows for {length} tokens; expected one for each, or all but "
                "the last"
            )
        rows.append(torch.nn.functional.pad(own[: length - 1].long(), (0, 0, 0, 0, 0, 1), value=-1))
    found = torch.cat(rows)
    ordered = found.sort(-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1, keepdim=True)
    return found.masked_fill(repeated, -1)
