"""The layers of a training step recorded as CUDA graphs, and replayed.

A model's layers launch hundreds of kernels. Each launch costs the host more time than a small batch costs
the GPU. A CUDA graph launches them all at once. Recorded are the layers' forward pass and their backward
pass, one graph each, from the embedded tokens [T, H] to the output of the final norm, and back:

    embedding -> [ layers, final norm ] -> head, loss        the part in brackets is recorded

The layers of an image encoder are recorded alike, from the embedded patches to the norm after them, by a
second object with a pool of its own, since its forward pass waits while the language model's runs.

All else runs as usual: the checks of ids and labels, the loss over however many labels there are, the
optimizer, clipping, loss scaling and learning rates. So nothing that changes from step to step is fixed in a
graph, and every loss and optimizer can be used. A micro-batch is one forward and one backward replay;
autograd adds its gradients to those of earlier micro-batches.

A graph runs the same kernels on the same addresses each time. Each call's inputs are copied to the addresses
of the recording, and documents are described by as many boundaries as the recording has room for: the rest
are empty documents. Results are bitwise those of the unrecorded layers, dropout included.

The first call with new shapes runs unrecorded and compiles kernels, the second records, later ones replay.
Recordings share one pool of memory, since one forward pass at a time waits for its backward pass.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.convert.errors import ConfigError
from liger_models.kernels._dispatch import once_differentiable
from liger_models.layers.model.recorded_inputs import RecordedInputs
from liger_models.layers.model.recording_checks import (
    RecordedModules,
    check_call,
    check_layers,
)
from liger_models.layers.sequences.sequences import Sequences

Layers = Callable[[list[Tensor], Sequences, dict[str, Tensor]], Tensor]
"""([x [T, H]], sequences, further inputs of layers by name) -> the output of the final norm, [T, H]."""

MOST = 8  # recordings; of more, the one used longest ago is dropped


class RecordedLayers:
    """The recordings of a model's layers.

    Args:
        model: a `Decoder`, or its `VisionEncoder`.

    A copy of the model records anew.
    """

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)
        self._forget()

    def _forget(self) -> None:
        """Drop all recordings: the modules have changed, or the addresses of their parameters."""
        self._recorded = RecordedModules(self._model())
        self._addresses = self._recorded.addresses()
        self._trained = [p for p in self._recorded.parameters if p.requires_grad]
        self._recordings: OrderedDict[Hashable, _Recording | None] = OrderedDict()  # None: seen once
        self._gradients: list[Tensor | None] = []  # their places, in all recordings
        self._places: set[int] = set()  # the same as addresses
        self._pool: Any = None
        self._waiting: weakref.ref[_Pass] | None = None

    def __deepcopy__(self, _: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    def __call__(
        self, first: list[Tensor], sequences: Sequences, further: dict[str, Tensor], layers: Layers
    ) -> Tensor:
        """`layers(first, sequences, further)`, replayed where that was recorded.

        Raises:
            ConfigError: layers, or a call, that cannot be recorded; the message says what to do.
        """
        check_call(first[0], sequences)
        if self._waiting is not None and (earlier := self._waiting()) is not None and not earlier.done:
            return layers(first, sequences, further)  # its activations must survive until its backward pass
        if not self._recorded.unchanged() or self._recorded.addresses() != self._addresses:
            self._forget()
        model: Any = self._model()
        mixers = (mixer for block in model.spec.blocks for mixer in block.mixers)
        chooses = any(getattr(mixer, "indexer", None) is not None for mixer in mixers)
        inputs = RecordedInputs.of(first[0], sequences, further, lengths_decide=chooses)
        key = inputs.key()
        if key not in self._recordings:
            check_layers(model, self._recorded)
        if key not in self._recordings:
            self._recordings[key] = None
            while len(self._recordings) > MOST:
                self._recordings.popitem(last=False)
            return layers(first, sequences, further)
        if not any(x.requires_grad for x in (*inputs.differentiable, *self._trained)):
            return layers(first, sequences, further)  # all layers are frozen
        self._recordings.move_to_end(key)
        self._set_gradients_aside()
        recording = self._recordings[key] or self._record(inputs, layers)
        self._recordings[key] = recording
        now = _Pass()
        self._waiting = weakref.ref(now)
        recording.inputs.fill(inputs)
        operands = *inputs.differentiable, *self._trained
        out, *noted = _Replay.apply(recording, now, *operands)
        for logits in noted:
            sequences.notes.router_logits.note(logits)
        return out

    def _record(self, inputs: RecordedInputs, layers: Layers) -> _Recording:
        check_layers(self._model(), self._recorded)
        if self._pool is None:
            self._pool = new_pool()
        lasting = inputs.lasting()
        recording = _Recording(self._recorded, self._trained, lasting, layers, self._pool, self._gradients)
        found = zip(self._gradients or recording.gradients, recording.gradients, strict=True)
        self._gradients = [own if place is None else place for place, own in found]
        self._places = {g.data_ptr() for g in self._gradients if g is not None}
        return recording

    def _set_gradients_aside(self) -> None:
        """Copy the gradients of earlier micro-batches, which lie where the next replay writes."""
        held = [p for p in self._trained if p.grad is not None and p.grad.data_ptr() in self._places]
        if held:
            before: list[Tensor] = [p.grad for p in held if p.grad is not None]
            copies = [torch.empty_like(g) for g in before]
            torch._foreach_copy_(copies, before)
            for p, copied in zip(held, copies, strict=True):
                p.grad = copied


class _Pass:
    """A forward pass of a recording, alive while its backward pass may follow."""

    done = False


class _Recording:
    """Both passes of the layers for one form of inputs.

    Args:
        modules: those that run.
        trained: the parameters that get gradients.
        inputs: tensors that belong to the recording.
        layers: the function to record.
        pool: the memory of all recordings.
        gradients: where the gradients of `trained` go; [] for the first recording, which finds places.
    """

    def __init__(
        self,
        modules: RecordedModules,
        trained: list[nn.Parameter],
        inputs: RecordedInputs,
        layers: Layers,
        pool: Any,
        gradients: list[Tensor | None],
    ):
        self.inputs, self._recorded, self._layers = inputs, modules.modules, layers
        self._live: list[Tensor] = []
        # Leaves of this recording's own graph: those of earlier steps may live on, and belong to no capture.
        aliases = [nn.Parameter(p.detach()) for p in trained]
        for alias, place in zip(aliases, gradients, strict=False):  # none in the first recording
            if place is not None:
                alias.register_post_accumulate_grad_hook(_move_gradient_to(place))
        self._aliases = {id(p): alias for p, alias in zip(trained, aliases, strict=True)}
        try:
            self.replay_forward, self.outputs = capture(self._forward, pool)
            self.upstream = [torch.empty_like(out) for out in self.outputs]
            self.replay_backward, made = capture(self._backward, pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"the layers could not be recorded as CUDA graphs ({error}): a layer, or an adapter, reads a "
                "value on the host or allocates outside of torch. Call model.set_cuda_graphs(False), or "
                "leave out --cuda-graphs"
            ) from error
        self.live_outputs = [out.requires_grad for out in self._live]
        self._live = []
        split = len(inputs.differentiable)
        self.input_gradients: list[Tensor | None] = made[:split]
        self.gradients: list[Tensor | None] = made[split:]

    def _forward(self) -> list[Tensor]:
        inputs, sequences = self.inputs, self.inputs.batch()
        with torch.enable_grad(), self._with_aliases():
            out = self._layers([inputs.x], sequences, dict(inputs.further))
        self._live = [out, *sequences.notes.router_logits.take()]
        return [live.detach() for live in self._live]

    def _backward(self) -> list[Tensor | None]:
        """The gradients of the inputs, then of the parameters."""
        leaves = [*self.inputs.differentiable, *self._aliases.values()]
        pairs = [(out, up) for out, up in zip(self._live, self.upstream, strict=True) if out.requires_grad]
        outputs, upstream = zip(*pairs, strict=True)
        device = self.inputs.x.device.type
        with self._with_aliases(), torch.autocast(device, enabled=False):
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            torch.autograd.backward(outputs, upstream, inputs=trained)
        made = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return made

    @contextmanager
    def _with_aliases(self) -> Iterator[None]:
        """While active, the modules hold the recording's own leaves in place of trained parameters."""
        changed = []
        try:
            for module in self._recorded:
                for name, p in module._parameters.items():
                    if id(p) in self._aliases:
                        changed.append((module._parameters, name, p))
            for held, name, p in changed:
                held[name] = self._aliases[id(p)]
            yield
        finally:
            for held, name, p in changed:
                held[name] = p


def _move_gradient_to(place: Tensor) -> Callable[[Tensor], None]:
    """A hook that copies a leaf's gradient to its place, and frees its own memory for the next one."""

    def move(leaf: Tensor) -> None:
        assert leaf.grad is not None
        place.copy_(leaf.grad)
        leaf.grad = place

    return move


class _Replay(torch.autograd.Function):
    """The layers as one operation: the inputs, then the parameters, are its operands."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, now: _Pass, *operands: Tensor) -> Any:
        ctx.recording, ctx.now = recording, now
        ctx.set_materialize_grads(False)
        recording.replay_forward()
        outputs = tuple(out.clone() for out in recording.outputs)
        constant = [out for out, live in zip(outputs, recording.live_outputs, strict=True) if not live]
        ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        recording = ctx.recording
        if ctx.now.done:
            raise RuntimeError(
                "this step was recorded as CUDA graphs, and its activations are gone after the first "
                "backward pass: call backward once for each forward pass, or model.set_cuda_graphs(False)"
            )
        for place, gradient in zip(recording.upstream, upstream, strict=True):
            place.zero_() if gradient is None else place.copy_(gradient)
        recording.replay_backward()
        ctx.now.done = True
        of_inputs = [None if g is None else g.clone() for g in recording.input_gradients]
        # Detached: a tensor that nobody else holds becomes the parameter's gradient without a copy.
        of_parameters = [None if g is None else g.detach() for g in recording.gradients]
        return None, None, *of_inputs, *of_parameters


def new_pool() -> Any:
    """A pool of memory for captures."""
    return torch.cuda.graph_pool_handle()


def capture(function: Callable[[], list[Any]], pool: Any) -> tuple[Callable[[], None], list[Any]]:
    """Record the kernels that `function` launches, without running them.

    Returns:
        A function that runs them, and the result of `function`: tensors that this overwrites.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as those that read data, may use the GPU meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = function()
    return graph.replay, result
