"""Gradients of the parts that read images, in steps in which no process has an image.

All processes run these parts in every step, since those that do would else wait for the others: a process
without images runs them on a blank one (`Vision.place`). Their gradients are then zeros where a single
process has none, and optimizers treat these differently: for zeros AdamW decays weights and moves them by its
momentum. So processes tell each other whether any has images, and where none has, zeros that were not there
before the backward pass are taken away after it.
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


class ImageGradients:
    """Takes zeros away from the gradients of parts that no process used.

    Known are the processes of DistributedDataParallel and of `fully_shard` (FSDP2). With others, and where
    FSDP2 keeps gradients whole between micro-batches, zeros stay.
    """

    def __init__(self) -> None:
        self._groups: list[Any] = []  # of FSDP2
        self._seen = False  # images, in micro-batches whose gradients have not been exchanged

    def __reduce__(self) -> Any:
        """A copy, or a pickle, is of a model that has no processes yet."""
        return ImageGradients, ()

    def watch(self, output: Tensor, parts: list[nn.Module], with_images: bool) -> None:
        """Called at the end of a forward pass in training, by all processes.

        Args:
            output: made with these parts; its gradient comes before theirs.
            parts: the modules that read images.
            with_images: whether this process has images.
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
            output.register_hook(lambda _: _after_backward(lambda: self.note_groups(parts)))
            return
        told = with_images or self._seen
        flag = torch.full((1,), int(told), device=output.device)
        answer = HostCopy(any_process(flag, groups)) if exchanged else None

        def end() -> None:
            if answer is None:
                self._seen |= with_images
            else:
                self._end(parts, bool(answer.tolist()[0]))

        output.register_hook(lambda _: _after_backward(end))

    def note_groups(self, parts: Iterable[nn.Module]) -> None:
        """Note over which process groups FSDP2 divides these modules, if some are divided at the moment."""
        self._groups = groups_of_shards(p for part in parts for p in part.parameters()) or self._groups

    def _end(self, parts: list[nn.Module], seen: bool) -> None:
        parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
        if all(p.grad is None for p in parameters):  # kept elsewhere until gradients are exchanged
            self._seen = seen
            return
        self._seen = False
        for p in parameters:
            gradient: Any = p.grad
            if seen and gradient is not None:
                gradient._of_images = True
            elif not hasattr(gradient, "_of_images"):  # else it has images of an earlier micro-batch
                p.grad = None


def _after_backward(function: Callable[[], None]) -> None:
    """Call a function when a backward pass has ended, and what others queued for its end is done: DDP and
    FSDP2 give gradients to parameters there.
    """
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(lambda: engine.queue_callback(function))
