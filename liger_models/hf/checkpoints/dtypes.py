"""Parameters that transformers keeps in float32 in a model of 16 bits: routers and sinks of some families.

The list is the installed transformers' own, and differs between its versions: from 5.24 on it has the routers
of most families whose router logits are in float32.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers.core_model_loading import build_glob_alternation
from transformers.modeling_utils import local_torch_dtype

from liger_models.hf.checkpoints.unread import own_skeleton


class DtypesOfTransformers:
    """The dtypes that transformers' loader gives our models' parameters."""

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Patterns of the parameters that the loader does not cast to `dtype`, and their dtype."""
        if dtype not in (torch.float16, torch.bfloat16):
            return {}
        return dict.fromkeys(map(re.escape, kept_in_float32(self, dtype)), torch.float32)


def kept_in_float32(model: Any, dtype: torch.dtype) -> list[str]:
    """Names in `model` of the parameters that transformers' own model of its config has in float32 when it is
    loaded in `dtype`, in bfloat16 and float16 alike.
    """
    with local_torch_dtype(dtype):
        theirs: Any = own_skeleton(model.architecture, model.config)
    # In float16 its list is longer, with matrices that are multiplied with hidden states.
    patterns = list(theirs._get_dtype_plan(torch.bfloat16))
    pattern, _, _ = build_glob_alternation(patterns or ["$^"])
    wide = {
        name.removeprefix(f"{theirs.base_model_prefix}.")
        for name, tensor in theirs.state_dict().items()
        if tensor.dtype == torch.float32 or pattern.search(name)
    }
    prefix, own = f"{model.base_model_prefix}.", model.weight_map(model.base_decoder.own_layout)
    return [
        name
        for name, expr in own.items()
        if any(ref.name.removeprefix(prefix) in wide for ref in expr.refs())
    ]
