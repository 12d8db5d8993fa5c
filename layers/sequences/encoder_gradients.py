"""Gradients of an encoder of images or sounds, in steps in which no process has any.

All processes run the encoder in every step, or those with images would wait for the others: a process without
images runs it on a blank one (`Vision.place`). Their gradients are then zeros where a single process would
have none, and optimizers treat these differently: for zeros AdamW decays weights and applies its momentum. So
processes agree on whether any of them has images. If none has, zeros that the backward pass created are
removed after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.layers.sequences.agreement import (
    any_process,
    ddp_wrapper,
    groups_of_shards,
    is_of_several_processes,
)
from liger_models.layers.sequences.host_copy import HostCopy


class EncoderGradients:
    """Remove zero gradients of parts that no process used.

    Supports DistributedDataParallel and `fully_shard` (FSDP2). With other wrappers, and while FSDP2 keeps
    unsharded gradients between micro-batches, the zeros remain.
    """

    def __init__(self) -> None:
        self._groups: list[Any] = []  # process groups of FSDP2
        self._seen = False  # images were used in micro-batches whose gradients are not yet reduced

    def __reduce__(self) -> Any:
        """Copy and pickle as a new object: a copied model is not part of any process group yet."""
        return EncoderGradients, ()

    def watch(self, output: Tensor, parts: list[nn.Module], with_images: bool) -> None:
        """Register an output; call it at the end of a training forward pass, on all processes.

        Args:
            output: computed with these parts; its gradient is computed before theirs.
            parts: the encoder and its projector.
            with_images: this process has images, or sounds.
        """
        if not output.requires_grad or not is_of_several_processes():
            return
        if not any(p.requires_grad for part in parts for p in part.parameters()):
            return
        wrapper = ddp_wrapper()
        exchanged = wrapper is None or wrapper.require_backward_grad_sync
        self.note_groups(parts)
        groups = self._groups if wrapper is None else [wrapper.process_group]
        if not groups:
            flag = torch.full((1,), int(with_images or self._seen), device=output.device)
            output.register_hook(lambda _: _after_backward(lambda: self._end_first(parts, flag)))
            return
        any_images = with_images or self._seen
        flag = torch.full((1,), int(any_images), device=output.device)
        answer = HostCopy(any_process(flag, groups)) if exchanged else None

        def end() -> None:
            if answer is None:
                self._seen |= with_images
            else:
                self._end(parts, bool(answer.tolist()[0]))

        output.register_hook(lambda _: _after_backward(end))

    def _end_first(self, parts: list[nn.Module], flag: Tensor) -> None:
        """End a step in whose forward pass FSDP2 had gathered all parts, so that their groups are new."""
        self.note_groups(parts)
        if self._groups:
            self._end(parts, bool(HostCopy(any_process(flag, self._groups)).tolist()[0]))

    def note_groups(self, parts: Iterable[nn.Module]) -> None:
        """Record the process groups over which FSDP2 shards these modules, if any are sharded now."""
        self._groups = groups_of_shards(p for part in parts for p in part.parameters()) or self._groups

    def _end(self, parts: list[nn.Module], seen: bool) -> None:
        parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
        if all(p.grad is None for p in parameters):  # FSDP2 keeps them elsewhere until gradients are reduced
            self._seen = seen
            return
        self._seen = False
        for p in parameters:
            gradient: Any = p.grad
            if seen and gradient is not None:
                gradient._of_images = True
            elif not hasattr(gradient, "_of_images"):  # else it includes images of an earlier micro-batch
                p.grad = None


def _after_backward(function: Callable[[], None]) -> None:
    """Call a function after a backward pass and its queued callbacks, in which DDP and FSDP2 assign
    gradients.
    """
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(lambda: engine.queue_callback(function))
