"""TRL's loss functions as references, run on synthetic scores without a trainer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


class OneProcess:
    """The part of an accelerator that the losses use, for a run with one process."""

    device = torch.device("cpu")
    num_processes = 1
    sync_gradients = True

    def gather(self, tensor):
        return tensor

    gather_for_metrics = unwrap_model = gather

    def reduce(self, tensor, reduction="sum"):
        return tensor

    def pad_across_processes(self, tensor, **_):
        return tensor


class Model(torch.nn.Module):
    is_gradient_checkpointing = False


def trainer(cls: type, **attributes: Any) -> Any:
    """Make an instance of a trainer's class with only these attributes and those that logging needs."""
    made = object.__new__(cls)
    defaults = {
        "model": Model(),
        "accelerator": OneProcess(),
        "aux_loss_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    vars(made).update(defaults | attributes)
    return made


def fused_output(log_probs, **others):
    """Output of TRL's fused head: the scores, and zeros for values that are only logged."""
    from trl.trainer.utils import FusedCausalLMOutput

    zeros = torch.zeros_like(log_probs)
    fields = {"entropy": zeros, "mean_logits": zeros, "log_sum_sq_probs": zeros, "is_top1": zeros.bool()}
    return FusedCausalLMOutput(log_probs=log_probs, **(fields | others))
