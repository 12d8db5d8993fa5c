"""Shared prompts inside TRL's trainers: each prompt of a micro-batch is computed once for all its answers.

    class Trainer(SharedPromptsMixin, trl.GRPOTrainer): ...     # also RLOOTrainer and DPOTrainer

TRL scores rows [prompt, answer] through one call, `model(..., labels=labels, fused_lm_head=True)`. The mixin
serves this call: rows with equal prompts become one prompt and the answers that continue it
(losses/shared_prompts.py), and the scores return to their rows. Losses, metrics, generation, importance
sampling correction and everything else are TRL's own, with the same values and gradients.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.convert.errors import UnsupportedModelError
from liger_models.hf.models import LigerForCausalLM
from liger_models.layers.model.scoring import ScoreOptions
from liger_models.losses.shared_prompts import shared_prompts


class SharedPromptsMixin:
    """A trainer of TRL whose prompts are computed once per micro-batch. Give it to the left of the trainer.

    The model, and the reference if there is one, are models of `liger_models.hf`, with or without PEFT. Calls
    with images, with a router's loss, with `cast_lm_head_to_fp32`, or without a prompt that several rows
    share run as in TRL. DPO's metrics `logits/...` are nan, since no logits exist.

    Raises:
        UnsupportedModelError: the model is not one of `liger_models.hf`.
    """

    model: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if getattr(self.args, "cast_lm_head_to_fp32", False):  # type: ignore[attr-defined]
            return
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                inner = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
                inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
                share_prompts(inner, getattr(self, "temperature", 1.0))


def share_prompts(model: nn.Module, temperature: float = 1.0) -> None:
    """Replace the forward that TRL's `add_fused_lm_head` gave to a model by one that shares prompts.

    Raises:
        UnsupportedModelError: as `SharedPromptsMixin`.
    """
    if not isinstance(model, LigerForCausalLM):
        raise UnsupportedModelError(
            f"shared prompts need a model of liger_models.hf, found {type(model).__name__}; call "
            "liger_models.hf.register() before loading it"
        )
    without = model.forward

    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        rows = None if args or not fused_lm_head else _rows_of(kwargs)
        if rows is None:
            extra = {"fused_lm_head": True} if fused_lm_head else {}
            return without(*args, **extra, **kwargs)
        return _scores(without, *rows, temperature)

    model.forward = types.MethodType(forward, model)


def _rows_of(kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """ids, mask and labels [rows, length] of a call that can share prompts, else None."""
    given = {name for name, value in kwargs.items() if value is not None}
    known = {"input_ids", "attention_mask", "labels"}
    if not known <= given or given - known - {"use_cache"}:
        return None
    return kwargs["input_ids"], kwargs["attention_mask"], kwargs["labels"]


def _scores(without: Any, ids: Tensor, mask: Tensor, labels: Tensor, temperature: float) -> Any:
    from trl.trainer.utils import FusedCausalLMOutput

    real, counts = mask.bool(), labels != -100
    items: dict[tuple[int, ...], list[list[int]]] = {}
    order: dict[tuple[int, ...], list[int]] = {}
    starts = counts.int().argmax(1).tolist()  # the first token of each answer
    lines = zip(ids.tolist(), real.tolist(), counts.any(1).tolist(), starts, strict=True)
    for number, (row, kept, counted, start) in enumerate(lines):
        first = start if counted else len(row)
        prompt = tuple(token for token, keep in zip(row[:first], kept[:first], strict=True) if keep)
        answer = [token for token, keep in zip(row[first:], kept[first:], strict=True) if keep]
        items.setdefault(prompt, []).append(answer)
        order.setdefault(prompt, []).append(number)
    if len(items) == len(ids) or () in items:
        return without(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    batch = shared_prompts(items.items()).to(ids.device)
    options = ScoreOptions(temperature, entropy=True, top1=True, log_sum_sq_probs=True)
    found = without(**batch, score=options)
    rows = torch.tensor([number for numbers in order.values() for number in numbers], device=ids.device)
    answers = real & (torch.arange(ids.shape[1], device=ids.device) >= _first(counts)[:, None])

    def placed(scores: Tensor) -> Tensor:
        """Scores of the packed row, at the positions that predict each answer's tokens."""
        values = batch.rows(scores)
        by_row = torch.zeros_like(values).index_copy(0, rows, values)
        counted = torch.zeros_like(batch.counted).index_copy(0, rows, batch.counted)
        full = values.new_zeros(len(ids), ids.shape[1] - 1)
        full = full.masked_scatter(answers[:, 1:], by_row[counted])
        return full.masked_fill(~counts[:, 1:], 0)

    log_probs = placed(found.log_probs)
    return FusedCausalLMOutput(
        loss=-log_probs.sum() / counts[:, 1:].sum().clamp(min=1),
        log_probs=log_probs,
        entropy=placed(found.entropy),
        log_sum_sq_probs=placed(found.log_sum_sq_probs),
        mean_logits=torch.full_like(log_probs, torch.nan).masked_fill(~counts[:, 1:], 0),
        is_top1=placed(found.is_top1.to(log_probs.dtype)).bool(),
        label_mask=counts[:, 1:],
    )


def _first(counts: Tensor) -> Tensor:
    """The first counted position of each row, or its length."""
    return torch.where(counts.any(1), counts.int().argmax(1), counts.shape[1])
