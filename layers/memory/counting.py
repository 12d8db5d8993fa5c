"""The memory of a step at each moment, and the choice of levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from liger_models.kernels.losses._linear_chunks import working_bytes
from liger_models.layers.memory import adapters, own_parts
from liger_models.layers.memory.choosing import OPERATIONS_OF_A_COPY, back_again, cheapest_plan, not_yet_away
from liger_models.layers.memory.encoders import EncoderCosts, costs_of, inputs_of, trains
from liger_models.layers.memory.further_tokens import ModuleCosts
from liger_models.layers.memory.gathered import Gathered
from liger_models.layers.memory.layer_costs import LayerCosts
from liger_models.layers.memory.on_host import on_host, streamed_at, streamed_bytes
from liger_models.layers.memory.own_parts import largest_part, linear_matrices, own_bytes, own_elements
from liger_models.layers.memory.pictures import NOTHING, Edges, Shown
from liger_models.layers.memory.planned import Planned, layers_without_gradient
from liger_models.layers.memory.step import Plan, Step
from liger_models.layers.recompute.activation_memory import ON_HOST, ActivationMemory

Moment = tuple[str, dict[str, int]]  # a moment of a step, and bytes by what takes them


class StepMemory:
    """Counts the memory of a step of a model, which may be on the meta device.

    Args:
        model: a decoder with its head. What its parameters are (their dtype, whether they are trained,
            whether they are divided over processes) is taken from them.
        step: the rest.
    """

    def __init__(self, model: Planned, step: Step):
        self.model, self.step = model, step
        self.itemsize = model.embed_tokens.weight.dtype.itemsize

    def resized(self, batch: int, seq: int, *media: Shown) -> StepMemory:
        """The same step with other rows, and their images and sounds; quantities that do not depend on them
        are reused.
        """
        shown, heard = (*media, NOTHING, NOTHING)[:2]
        other = StepMemory(self.model, replace(self.step, batch=batch, seq=seq, shown=shown, heard=heard))
        vars(other).update((name, vars(self)[name]) for name in _OF_PARAMETERS if name in vars(self))
        return other

    def plan(
        self,
        levels: Sequence[ActivationMemory],
        budget: int | None = None,
        host_budget: int | None = None,
    ) -> Plan:
        """Plan the memory of a step with these levels of all `stages`, within the available bytes."""
        stages = list(zip(self.stages, levels, strict=True))
        kept = [costs.kept[level] for costs, level in stages]
        moments = [
            *self._frozen_encoder(),
            self._forward(kept, levels),
            self._loss(kept, levels),
            *self._backward(kept, levels),
            self._embedding(),
            self._optimizer(),
        ]
        moment, parts = max(moments, key=lambda found: sum(found[1].values()))
        sizes = [costs.on_host for costs, level in stages if level == "offload"]
        host, keeps_results = on_host(sizes, host_budget)
        repeated = sum(costs.repeated(level, keeps_results) for costs, level in stages)
        share = repeated / (3 * sum(costs.forward for costs in self.stages) + self._head_work)
        host += sum(costs.saved_on_host for costs, level in stages if level == ON_HOST)
        host += self._state_on_host + self._weights_on_host
        first, peak = len(self.encoder), sum(parts.values())
        own, of_encoder = tuple(levels[first:]), tuple(levels[:first])
        return Plan(own, peak, moment, parts, share, budget, host, host_budget, of_encoder)

    def choose_levels(
        self, budget: int, host_budget: int | None = None, operations_of_a_copy: float = OPERATIONS_OF_A_COPY
    ) -> Plan:
        """The levels with the least recomputation among those with which the step fits: `cheapest_plan`."""
        return cheapest_plan(self, budget, host_budget, operations_of_a_copy)

    def _forward(self, kept: list[int], levels: Sequence[ActivationMemory]) -> Moment:
        last = self.stages[-1]
        transient = last.at_end if levels[-1] == "lean" else 0
        if self._units:  # the head is fetched while the last layer runs
            transient = max(transient, last.running[levels[-1]])
        gradients, streamed = self.gradients if self.step.accumulates else 0, sum(self._units[-2:])
        there = self._outside_layers + sum(kept) + not_yet_away(self.stages, levels)
        return "the forward pass", self._parts(there, transient, gradients, streamed)

    def _loss(self, kept: list[int], levels: Sequence[ActivationMemory]) -> Moment:
        step, spec = self.step, self.model.spec
        head: Any = getattr(self.model, "lm_head", None) or self.model.embed_tokens
        trained = step.lora_rank == 0 and head.weight.requires_grad
        trained = trained or getattr(head, "trained_rows", None) is not None
        wide = max(4, self.itemsize) if spec.float32_head else self.itemsize
        sizes = step.tokens, spec.hidden_size, spec.vocab_size, wide
        transient = working_bytes(*sizes, trained, step.labelled) + self._further.at_the_loss(levels[-1])
        if wide > self.itemsize:  # wider copies of the hidden states and of the weight
            narrow = spec.vocab_size * (head.weight.itemsize < wide)
            transient += wide * spec.hidden_size * (step.tokens + narrow)
        gradients = self.gradients if step.accumulates else 0
        # The last norm's input and output, rounded, the head's layers'; the last layer's input comes first.
        wide = max(4, self.itemsize) if self.model.layers[-1].float32_stream else self.itemsize
        of_norm = self._streams.at_loss or 2 * self._stream * self.itemsize // wide
        transient += of_norm + ((levels[-1] == "offload") + (spec.head_layers is not None)) * self._stream
        transient += 0 if self._gathered is None else self._gathered.at_the_loss()
        transient, streamed = max(transient, self._streams.at_end), sum(self._units[-1:])
        return "the loss", self._parts(self._outside_layers + sum(kept), transient, gradients, streamed)

    def _frozen_encoder(self) -> list[Moment]:
        """Forward pass of encoders that keep nothing, before the language model's layers run."""
        layers = [layer for costs in self._encoders for layer in costs.layers]
        if not layers or self.encoder:
            return []
        transient = max(costs.transient["lean"] + 2 * costs.stream for costs in layers)
        shown = self.step.shown.pixels + self.step.heard.pixels
        gradients = self.gradients if self.step.accumulates else 0
        return [("the encoder's forward pass", self._parts(shown, transient, gradients))]

    def _backward(self, kept: list[int], levels: Sequence[ActivationMemory]) -> list[Moment]:
        found, first, edges, vision = [], len(self.encoder), self._edges, self.model.spec.vision
        deep, merges_after = getattr(vision, "deep", ()), getattr(vision, "merges_after", None)
        new = 0 if self.step.accumulates else 1
        of_encoder, of_way, of_layers = self._own_gradients
        gradients = self.gradients - new * (sum(of_encoder) + of_way + sum(of_layers))
        if new and not self._tied:  # the embedding's comes last
            gradients -= self._trained_bytes(self.model.embed_tokens) // self.step.gpus
        left = self._outside_layers + sum(kept)
        for work, missing in self._further.in_backward(levels[-1]):
            found.append(("backward of an MTP module", self._parts(left, work, gradients - new * missing)))
        left += self._further.waiting
        for i in reversed(range(len(kept))):
            costs, number = self.stages[i], i - first
            if number == -1:
                left -= edges.language
                found.append(("backward of the projector", self._parts(left, edges.backward, gradients)))
                left += len(deep) * edges.state - edges.projector
                gradients += new * of_way
            if i == merges_after and number < 0:
                found.append(("backward of the encoder's merger", self._parts(left, edges.merger, gradients)))
            own = new * (of_layers[number] if number >= 0 else of_encoder[i])
            of_adapters = own if self.step.lora_rank else 0  # small, and counted from the layer's end on
            gradients += own - of_adapters
            left += costs.own_gradient
            transient = costs.transient[levels[i]]
            if self._gathered is not None:
                transient += self._gathered.at_layer(i - first - len(self.model.layers))
            if levels[i] == "offload" and i > 0:  # the input of the layer before it is fetched
                transient += self.stages[i - 1].stream
            transient += back_again(self.stages, levels, i)
            name = f"layer {number}" if number >= 0 else f"layer {i} of the encoder"
            streamed = streamed_at(self._units, number + 1) if number >= 0 else 0
            found.append((f"backward of {name}", self._parts(left, transient, gradients, streamed)))
            gradients += of_adapters
            left -= kept[i] - costs.own_input + (number < 0 and i in deep) * edges.state
        if getattr(vision, "pyramid", None) is not None:  # an encoder without layers, whose blocks run again
            found.append(("backward of the encoder", self._parts(left, edges.merger, gradients)))
        return found

    def _embedding(self) -> Moment:
        """Gradients of the embedding: two for a weight shared with the head, until they are added."""
        second = self._trained_bytes(self.model.embed_tokens) if self._tied else 0
        return "the embedding's gradient", self._parts(0, second, self.gradients)

    def _optimizer(self) -> Moment:
        work = self.step.optimizer_work
        if self.step.optimizer_on_host:
            work = min(work, self._state)  # the part of the state that is streamed
        return "the optimizer's step", self._parts(0, work - self.step.float8_copies, self.gradients)

    def _parts(self, activations: int, transient: int, gradients: int, streamed: int = 0) -> dict[str, int]:
        return {
            "weights": self._weights - self._weights_on_host + streamed,
            "optimizer": 0 if self.step.optimizer_on_host else self._state,
            "gradients": gradients,
            "activations": activations,
            "temporary": transient + self._tables + self._dequantised + self.step.float8_copies,
        }

    # -- what they are made of

    @property
    def stages(self) -> list[LayerCosts]:
        """All layers that keep something, in execution order: the encoder's first."""
        return [*self.encoder, *self.layers]

    @property
    def encoder(self) -> list[LayerCosts]:
        """Layers of trained encoders that receive images or sounds, one encoder after the other."""
        return [layer for costs in self.trained_encoders for layer in costs.layers]

    @property
    def trained_encoders(self) -> list[EncoderCosts]:
        """The encoders with these layers."""
        return [costs for costs in self._encoders if costs.trains and costs.layers]

    @cached_property
    def _encoders(self) -> list[EncoderCosts]:
        size, dtype = self.model.spec.hidden_size, self.model.embed_tokens.weight.dtype
        parts = zip(self.model.encoders, self._trains, strict=True)
        return [costs_of(part, self.step, trained, size, dtype) for part, trained in parts]

    @cached_property
    def _trains(self) -> list[tuple[bool, bool]]:
        """Of each encoder, whether it is trained, and whether its projector is."""
        return [trains(part) for part in self.model.encoders]

    @cached_property
    def _edges(self) -> Edges:
        edges = [costs.edges for costs in self._encoders]
        return Edges(*(sum(sizes) for sizes in zip(*map(astuple, edges), strict=True))) if edges else Edges()

    @property
    def _outside_layers(self) -> int:
        """Bytes kept outside of layers: for images and sounds, norms of embeddings, and the first streams."""
        edges, spec = self._edges, self.model.spec
        normed = self._stream if (spec.embed_norm or spec.id_norm) is not None and not self._idle else 0
        given = self.step.shown.pixels + self.step.heard.pixels
        return given + edges.encoder + edges.projector + edges.language + normed + self._streams.first

    @cached_property
    def layers(self) -> list[LayerCosts]:
        """Layers of the language model."""
        known: dict[Any, LayerCosts] = {}
        for layer in self.model.layers:
            if layer.spec not in known:
                known[layer.spec] = LayerCosts.of(layer, self.step, self.itemsize)
        every = [known[layer.spec] for layer in self.model.layers]
        if self.model.layers[0].float32_stream:  # its first sum is made within layer 0
            every[0] = every[0].with_input(self.step.tokens * self.model.spec.hidden_size * self.itemsize)
        return [*(costs.without_gradient() for costs in every[: self._idle]), *every[self._idle :]]

    @cached_property
    def _further(self) -> ModuleCosts:
        return ModuleCosts.of(self.model, self.step, self.itemsize)

    @cached_property
    def _idle(self) -> int:
        return 0 if self.step.lora_rank else layers_without_gradient(self.model)

    @cached_property
    def _tables(self) -> int:
        """Cosine and sine of every position, and per token its id, position and label; with images or sounds
        also the one it belongs to.
        """
        tokens = self.step.tokens * (24 + sum(4 * rope.dim for rope in self.model.spec.ropes))
        for part in self.model.encoders:
            if count := inputs_of(part, self.step).tokens:
                ropes = {rope for layer in part.encoder.layers for rope in layer.spec.ropes}
                tokens += 9 * self.step.tokens + count * (24 + sum(4 * rope.dim for rope in ropes))
        return tokens

    @property
    def _stream(self) -> int:
        """Bytes of the residual stream."""
        return self.step.tokens * self.model.layers[0].stream_bytes(self.itemsize)

    @cached_property
    def _streams(self) -> own_parts.StreamCosts:
        return own_parts.StreamCosts.of(self.model, self.step, self.itemsize, self._idle)

    @cached_property
    def _tied(self) -> bool:
        return self.model.spec.tie_word_embeddings

    @cached_property
    def _weights(self) -> int:
        total = sum(own_bytes(p) for p in self.model.parameters())
        if self.step.weight_bytes is not None:
            elements = sum(math.prod(shape) for _, shape in self._matrices)
            total += int(elements * (self.step.weight_bytes - self.itemsize))
        return (total + self._headless * self.itemsize) // self.step.gpus + 4 * self._adapter_elements

    @cached_property
    def _units(self) -> list[int]:
        """Bytes in the host's memory of the embedding, each layer and the head; nothing if weights stay."""
        if not self.step.weights_on_host:
            return []
        head: Any = getattr(self.model, "lm_head", None)
        modules: list[Any] = [self.model.embed_tokens, *self.model.layers, *([] if head is None else [head])]
        return [streamed_bytes(module, self._matrices, self.step, self.itemsize) for module in modules]

    @cached_property
    def _weights_on_host(self) -> int:
        """Bytes of the units; a head that is the embedding counts once."""
        return sum(self._units[:-1] if self._tied else self._units)

    @cached_property
    def _adapter_elements(self) -> int:
        return adapters.elements(self.step, self._quantisable)

    @property
    def _quantisable(self) -> list[Any]:
        """Modules whose linear layers are quantised and adapted."""
        return [*self.model.layers, *(x for part in self.model.encoders for x in _adapted_parts(part))]

    @cached_property
    def _matrices(self) -> list[tuple[Tensor, tuple[int, ...]]]:
        return linear_matrices(self._quantisable)

    @cached_property
    def _headless(self) -> int:
        """Elements of the head of a decoder whose head belongs to another model."""
        has_head = self._tied or hasattr(self.model, "lm_head")
        return 0 if has_head else self.model.spec.vocab_size * self.model.spec.hidden_size

    @cached_property
    def _trained(self) -> int:
        """Number of trained elements."""
        if self.step.lora_rank:
            return self._adapter_elements
        own = sum(own_elements(p) for p in self.model.parameters() if p.requires_grad)
        return own + (self._headless if self.model.embed_tokens.weight.requires_grad else 0)

    @property
    def _state(self) -> int:
        """Bytes of the optimizer's state. Adapters are whole in each process."""
        gpus = 1 if self.step.lora_rank else self.step.gpus
        return int(self._trained * self.step.optimizer_bytes / gpus)

    @cached_property
    def _state_on_host(self) -> int:
        """Bytes of the pinned state: each tensor is rounded up to a power of two."""
        if not self.step.optimizer_on_host:
            return 0
        sizes = [-(-own_bytes(p) // self.step.gpus) for p in self.model.parameters() if p.requires_grad]
        return int(self._state * sum(1 << (size - 1).bit_length() for size in sizes) / max(1, sum(sizes)))

    def _trained_bytes(self, module: Any) -> int:
        if self.step.lora_rank:
            return 0
        return sum(own_bytes(p) for p in module.parameters() if p.requires_grad)

    @cached_property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        if self.step.lora_rank:
            return 4 * self._adapter_elements
        headless = self._headless * self.itemsize if self.model.embed_tokens.weight.requires_grad else 0
        return (self._trained_bytes(self.model) + headless) // self.step.gpus

    @property
    def _own_gradients(self) -> tuple[list[int], int, list[int]]:
        """Gradients of the layers in `encoder`, of the encoders' other parts, and of the model's layers."""
        of_modules = self._gradients_of_modules
        of_own = [of_modules[x] for costs in self.trained_encoders for x in costs.part.encoder.layers]
        whole = sum(of_modules[part] for part in self.model.encoders)
        return of_own, whole - sum(of_own), [of_modules[layer] for layer in self.model.layers]

    @cached_property
    def _gradients_of_modules(self) -> dict[Any, int]:
        parts = self.model.encoders
        layers = [*(layer for part in parts for layer in part.encoder.layers), *self.model.layers]
        if self.step.lora_rank:
            found = {layer: 4 * adapters.elements(self.step, [layer]) for layer in layers}
            return found | {part: 4 * adapters.elements(self.step, _adapted_parts(part)) for part in parts}
        return {module: self._trained_bytes(module) // self.step.gpus for module in [*parts, *layers]}

    @cached_property
    def _gathered(self) -> Gathered | None:
        """The gathered parameters of a sharded model."""
        model, step = self.model, self.step
        if step.gpus == 1 and not any(hasattr(p, "to_local") for p in model.parameters()):
            return None
        layers = [*(x for part in model.encoders for x in part.encoder.layers), *model.layers]
        embedding = model.embed_tokens.weight
        inside = {id(p) for layer in layers for p in layer.parameters()}
        head: Any = getattr(model, "lm_head", None)
        ends = [] if self._tied else [embedding, *(() if head is None else head.parameters())]
        rest = [p for p in model.parameters() if id(p) not in inside | {id(p) for p in ends}]
        own_head = None if self._tied else embedding  # if of the same size
        return Gathered.of(layers, own_head, rest, step.gpus, not step.lora_rank, model.gathered_once)

    @cached_property
    def _dequantised(self) -> int:
        """The largest quantised matrix, dequantised for its product."""
        return 0 if self.step.weight_bytes is None else largest_part(self._quantisable)

    @cached_property
    def _head_work(self) -> int:
        spec, passes = self.model.spec, 1 + len(self._further.blocks)
        return 6 * passes * self.step.tokens * spec.hidden_size * spec.vocab_size


def _adapted_parts(part: Any) -> list[Any]:
    """The modules of an encoder and its way out whose linear layers are adapted."""
    return [*part.encoder.layers, *part.ways_out()]


# Counted once for all batch sizes of a plan.
_OF_PARAMETERS = (
    *("_units", "_weights_on_host"),
    *("_weights", "_adapter_elements", "_matrices", "_headless", "_trained", "_tied", "gradients"),
    *("_gradients_of_modules", "_trains", "_gathered", "_dequantised", "_state_on_host", "_idle"),
)
