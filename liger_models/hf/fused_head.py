"""TRL's fused head (`add_fused_lm_head`), which its trainers put in the place of a model's forward. It makes
logits of the last hidden states, the head's weight and bias, and a scale or a cap under certain config keys.
"""

from __future__ import annotations

from typing import Any

from liger_models.convert.errors import UnsupportedModelError

ARGUMENT = "fused_lm_head"  # of the new forward alone
CAP = "final_logit_softcapping"  # the one key of a cap that TRL reads


def refuse_other_logits(model: Any, forward: Any) -> None:
    """Refuse to let a fused head replace the forward of a model of which it would compute other logits.

    Args:
        model: of `LigerForCausalLM`.
        forward: what is assigned to its forward.

    Raises:
        UnsupportedModelError: the head has further layers, or a cap that TRL does not read.
    """
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    if code is None or ARGUMENT not in code.co_varnames:
        return
    cap = model.logit_form.softcap
    if model.head_layers is not None:
        found = "the layers of the head before its last one"
    elif model.logit_form.ids is not None:
        found = "leaving out ids that are never predicted"
    elif cap is not None and getattr(model.config.get_text_config(), CAP, None) != cap:
        found = f"the cap of the logits ({cap:g}), which this config does not name {CAP}"
    else:
        return
    raise UnsupportedModelError(
        f"TRL's trainers compute logits without {found}, so they would train another model: use "
        "transformers' Trainer, or `liger-models train`"
    )
