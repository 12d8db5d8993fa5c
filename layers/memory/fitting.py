"""Choice of levels during training, when a batch arrives."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any

import torch
from torch import nn

from liger_models.convert.sizes import parse_size
from liger_models.layers.memory.choosing import OPERATIONS_OF_A_COPY
from liger_models.layers.memory.counting import StepMemory
from liger_models.layers.memory.own_parts import own_bytes, own_elements
from liger_models.layers.memory.pictures import NOTHING, Shown, shown_by
from liger_models.layers.memory.planned import Planned
from liger_models.layers.memory.sounds import heard_by
from liger_models.layers.memory.step import Plan, Step
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.layers.recompute.host_weights import device_of
from liger_models.layers.recompute.offload import host_memory_left
from liger_models.layers.sequences.sequences import Sequences

_log = logging.getLogger("liger_models")


class FittingLevels:
    """Choose a decoder's levels at the first training batch, and again for a larger batch and after the
    optimizer's first step, when the GPU memory of its state is measured. Assumes a label for each token.

    Args:
        budget: what the process may take of the GPU: bytes, text such as "120GiB", or a share up to 1 of what
            it could have when it is first asked; None: 0.95 of that, or 0.9 for a sharded model.
        optimizer_bytes: the optimizer's state of each trained element. Default: that of
            `liger_models.optim.AdamW`, by the parameters' dtypes. 0 if it is on the host.
        say: called with a description of the choice. Default: the log "liger_models", as information.

    Raises:
        ValueError: a budget that is none of these.
    """

    def __init__(
        self,
        budget: float | str | None = None,
        optimizer_bytes: float | None = None,
        say: Callable[[str], object] | None = None,
    ):
        self._asked = budget
        parse_budget(budget)  # or raise
        self.optimizer_bytes = optimizer_bytes
        self.say = say or _log.info
        self.tokens, self.shown, self.heard = 0, NOTHING, NOTHING
        self.plan: Plan | None = None
        self._versions = 0  # of the parameters, when levels were first chosen
        self._has_state = False  # whether the optimizer's state is among what the process holds

    def __call__(
        self, model: Planned, sequences: Sequences, pictures: Any = None, sounds: Any = None
    ) -> None:
        """Choose levels if this batch has more tokens, images or sounds than previous ones.

        Processes that share a sharded model choose the same levels, once: after each has received its first
        batch.

        Raises:
            ValueError: there is no GPU whose memory could be measured, and no budget in bytes.
        """
        divided = sequences.slice is not None  # ranks that exchange heads must run the same layers again
        sharded = any(hasattr(p, "to_local") for p in model.parameters())
        shared = divided or sharded
        tokens, shown = sequences.documents.num_tokens, shown_by(model.spec.vision, pictures)
        heard = heard_by(model.spec.audio, sounds)
        if self.plan is None:
            self._versions = _versions(model)
        larger = tokens > self.tokens or not shown.no_more_than(self.shown)
        larger = larger or not heard.no_more_than(self.heard)
        if self.plan is not None and (shared or not (self._first_step_was_made(model) or larger)):
            return
        tokens = max(tokens, self.tokens)
        shown, heard = shown.at_least(self.shown), heard.at_least(self.heard)
        device = device_of(model)
        share, budget = parse_budget(self._asked, sharded)
        if budget is None:
            budget = self._measured(model, device, share)
        elif self._has_state:
            budget -= self._others(model, device)
        # Recorded layers copy nothing to the host.
        host_budget = host_memory_left() if getattr(model, "recorded", None) is None else 0
        of_a_copy = _operations_of_a_copy(device) if host_budget else OPERATIONS_OF_A_COPY
        if shared:
            numbers = [tokens, -budget, -host_budget, of_a_copy, *astuple(shown), *astuple(heard)]
            agreed = torch.tensor(numbers, device=device)
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX)
            tokens, budget, host_budget, of_a_copy, *sizes = agreed.tolist()
            half = len(sizes) // 2
            budget, host_budget = -budget, -host_budget
            shown, heard = Shown(*sizes[:half]), Shown(*sizes[half:])
        per_element = self.optimizer_bytes
        if per_element is None:
            per_element = 0 if self._has_state else _adamw_bytes(model.parameters())
        accumulates = any(p.grad is not None for p in model.parameters())
        step = Step(
            *(1, tokens, per_element, accumulates),
            longest=sequences.documents.max_seqlen,
            sequence_ranks=sequences.slice.ranks if sequences.slice is not None else 1,
            shown=shown,
            heard=heard,
            weights_on_host=getattr(model, "host_weights", None) is not None,
        )
        before, self.tokens, self.shown, self.heard = self.plan, tokens, shown, heard
        counted = StepMemory(model, step)
        self.plan = counted.choose_levels(budget, host_budget, of_a_copy)
        for layer, level in zip(model.layers, self.plan.levels, strict=True):
            layer.set_activation_memory(level)
        levels = list(self.plan.encoder_levels)
        for costs in counted.trained_encoders:
            own, levels = levels[: len(costs.layers)], levels[len(costs.layers) :]
            costs.part.encoder.set_activation_memory(own)
        if not larger and before is not None and self.plan.levels == before.levels:
            return
        of_encoders = f" and {shown.tokens:,} of images" if shown.tokens else ""
        of_encoders += f" and {heard.tokens:,} of sounds" if heard.tokens else ""
        self.say(f"activation memory for {tokens:,} tokens{of_encoders}: {self.plan}")
        if not self.plan.fits:
            _log.warning("a step of %d tokens does not fit in memory_budget at any level", tokens)

    def _measured(self, model: Planned, device: torch.device, share: float) -> int:
        """Bytes available to this step: the share of the GPU, minus the process's other memory there."""
        if device.type != "cuda":
            raise ValueError(
                f"activation_memory='auto' measures a GPU, and the model is on {device}; pass "
                "memory_budget in bytes, or choose one of " + ", ".join(LEVELS)
            )
        free, _ = torch.cuda.mem_get_info(device)
        mine = torch.cuda.memory_reserved(device)
        return int(share * (free + mine)) - self._others(model, device)

    def _others(self, model: Planned, device: torch.device) -> int:
        """Bytes that the process holds on the GPU besides parameters and gradients, such as an optimizer's
        state.
        """
        here = (p for p in model.parameters() if p.device.type == device.type)
        known = (own_bytes(p) + (0 if p.grad is None else own_bytes(p.grad)) for p in here)
        return max(torch.cuda.memory_allocated(device) - sum(known), 0)

    def _first_step_was_made(self, model: Planned) -> bool:
        """Whether an optimizer has written to parameters for the first time since levels were chosen, so that
        its state can be measured. (Our AdamW, whose state is known, writes without changing versions.)
        """
        measurable = device_of(model).type == "cuda" and self.optimizer_bytes is None
        if self._has_state or not measurable or _versions(model) == self._versions:
            return False
        self._has_state = True
        return True


def _operations_of_a_copy(device: torch.device) -> int:
    """Matrix operations in the time in which this GPU copies a byte to the host, measured."""
    if device.type != "cuda":
        return OPERATIONS_OF_A_COPY
    size, times = 4096, []
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        x = torch.arange(size * size, dtype=torch.float32, device=device).sin().bfloat16().view(size, size)
        there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        for work in (lambda: x @ x, lambda: there.copy_(x, non_blocking=True)):
            work()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(torch.cuda.current_stream(device))
            for _ in range(4):
                work()
            end.record(torch.cuda.current_stream(device))
            end.synchronize()
            times.append(begin.elapsed_time(end))
    product, copy = times
    return int(2 * size**3 / product * copy / x.nbytes)


def _versions(model: Planned) -> int:
    """A number that changes when a trained parameter is written to."""
    return sum(p._version for p in model.parameters() if p.requires_grad)


def parse_budget(budget: float | str | None, sharded: bool = False) -> tuple[float, int | None]:
    """A share of the GPU, and bytes if they were given: (0.95, None), (0.8, None), (1.0, 128849018880).

    The default of a sharded model is 0.9. PyTorch's allocator keeps memory apart for the streams on which
    collectives run: for Llama-3-8B over two GPUs it reserves 6% of a GPU more than the peak of the step.

    Raises:
        ValueError: it is neither.
    """
    if budget is None:
        return (0.9 if sharded else 0.95), None
    with contextlib.suppress(ValueError):  # text with a unit is not a number
        if 0 < float(budget) <= 1:
            return float(budget), None
    try:
        return 1.0, parse_size(str(budget))
    except ValueError as error:
        raise ValueError(
            f"memory_budget is {budget!r}; expected bytes, text such as '120GiB', or a share such as 0.9"
        ) from error


def _adamw_bytes(parameters: Iterator[nn.Parameter]) -> float:
    """Bytes of AdamW state per trained element, on average: two moments, and 2 more bytes for bfloat16."""
    trained = [p for p in parameters if p.requires_grad]
    state = sum(own_elements(p) * (6 if p.dtype.itemsize == 2 else 2 * p.dtype.itemsize) for p in trained)
    return state / max(1, sum(own_elements(p) for p in trained))
