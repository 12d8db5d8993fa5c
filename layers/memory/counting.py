"""The memory of a step at each moment, and the choice of levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor

from liger_models.kernels.losses._linear_chunks import working_bytes
from liger_models.layers.memory import adapters, frozen
from liger_models.layers.memory.further_tokens import ModuleCosts
from liger_models.layers.memory.gathered import Gathered
from liger_models.layers.memory.layer_costs import LayerCosts
from liger_models.layers.memory.on_host import on_host, streamed_at, streamed_bytes
from liger_models.layers.memory.own_parts import largest_part, linear_matrices, own_bytes, own_elements
from liger_models.layers.memory.pictures import NOTHING, Edges, Shown, edges_of
from liger_models.layers.memory.planned import Planned
from liger_models.layers.memory.step import LADDERS, Plan, Step
from liger_models.layers.recompute.activation_memory import ActivationMemory


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

    def resized(self, batch: int, seq: int, shown: Shown = NOTHING) -> StepMemory:
        """The same step with other rows; quantities that do not depend on them are reused."""
        other = StepMemory(self.model, replace(self.step, batch=batch, seq=seq, shown=shown))
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
        host += self._state_on_host + self._weights_on_host
        first, peak = len(self.encoder), sum(parts.values())
        own, of_encoder = tuple(levels[first:]), tuple(levels[:first])
        return Plan(own, peak, moment, parts, share, budget, host, host_budget, of_encoder)

    def choose_levels(self, budget: int, host_budget: int | None = None) -> Plan:
        """The levels with the least recomputation among those with which the step fits, copies to the host
        included; if none fits, those with the lowest peak.
        """
        plans: list[Plan] = []
        for ladder in LADDERS:
            plans += self._descend(ladder, budget, host_budget)
            if plans[0].fits:  # which recomputes nothing
                return plans[0]
        fitting = [plan for plan in plans if plan.fits]
        if fitting:
            return min(fitting, key=lambda plan: plan.repeated)
        return min(plans, key=lambda plan: plan.peak)

    def _descend(
        self, ladder: Sequence[ActivationMemory], budget: int, host_budget: int | None
    ) -> list[Plan]:
        """One level for all layers, lowered step by step until the step fits."""
        plans = [self.plan([level] * len(self.stages), budget, host_budget) for level in ladder]
        plan, levels = plans[0], [ladder[0]] * len(self.stages)
        while not plan.fits:
            keeps, stages = host_budget is not None, zip(self.stages, levels, strict=True)
            found = [costs.next_of(level, ladder, keeps) for costs, level in stages]
            further = [(price, i, to) for i, (price, to) in enumerate(found) if to is not None]
            if not further:
                break
            # The first of equal layers, since it keeps its tensors the longest.
            _, i, to = min(further)
            levels[i] = to
            plan = self.plan(levels, budget, host_budget)
            plans.append(plan)
        return plans

    # -- the moments

    def _forward(self, kept: list[int], levels: Sequence[ActivationMemory]) -> tuple[str, dict[str, int]]:
        room = self.stages[-1].at_end if levels[-1] == "lean" else 0
        gradients, streamed = self.gradients if self.step.accumulates else 0, sum(self._units[-2:])
        return "the forward pass", self._parts(self._outside_layers + sum(kept), room, gradients, streamed)

    def _loss(self, kept: list[int], levels: Sequence[ActivationMemory]) -> tuple[str, dict[str, int]]:
        step, spec = self.step, self.model.spec
        head: Any = getattr(self.model, "lm_head", None)
        head = self.model.embed_tokens if head is None else head
        trained = step.lora_rank == 0 and head.weight.requires_grad
        trained = trained or getattr(head, "trained_rows", None) is not None
        sizes = step.tokens, spec.hidden_size, spec.vocab_size, self.itemsize
        room = working_bytes(*sizes, trained, step.labelled) + self._further.at_the_loss(levels[-1])
        gradients = self.gradients if step.accumulates else 0
        # The last norm's input and output; the last layer's input is needed first.
        room += (2 + (levels[-1] == "offload")) * self._stream
        room += 0 if self._gathered is None else self._gathered.at_the_loss()
        streamed = sum(self._units[-2:])
        return "the loss", self._parts(self._outside_layers + sum(kept), room, gradients, streamed)

    def _frozen_encoder(self) -> list[tuple[str, dict[str, int]]]:
        """Forward pass of an encoder that keeps nothing, before the language model's layers run."""
        if not self._encoder_costs or self.encoder:
            return []
        room = max(costs.transient["lean"] + 2 * costs.stream for costs in self._encoder_costs)
        gradients = self.gradients if self.step.accumulates else 0
        return [("the encoder's forward pass", self._parts(self.step.shown.pixels, room, gradients))]

    def _backward(
        self, kept: list[int], levels: Sequence[ActivationMemory]
    ) -> list[tuple[str, dict[str, int]]]:
        found, first, edges = [], len(self.encoder), self._edges
        new = 0 if self.step.accumulates else 1
        of_encoder, of_way, of_layers = self._own_gradients
        gradients = self.gradients - new * (sum(of_encoder) + of_way + sum(of_layers))
        if new and not self._tied:  # the embedding's comes last
            gradients -= self._trained_bytes(self.model.embed_tokens) // self.step.gpus
        left = self._outside_layers + sum(kept)
        for room, missing in self._further.in_backward(levels[-1]):
            found.append(("backward of an MTP module", self._parts(left, room, gradients - new * missing)))
        left += self._further.waiting
        for i in reversed(range(len(kept))):
            costs, number = self.stages[i], i - first
            if number == -1:
                left -= edges.language + edges.projector
                gradients += new * of_way
                room = 2 * edges.projector + 3 * costs.stream
                found.append(("backward of the projector", self._parts(left, room, gradients)))
            gradients += new * (of_layers[number] if number >= 0 else of_encoder[i])
            left += costs.own_gradient
            room = costs.transient[levels[i]]
            if self._gathered is not None:
                room += self._gathered.at_layer(i - first - len(self.model.layers))
            if levels[i] == "offload" and i > 0:  # the input of the layer before it is fetched
                room += costs.stream
            name = f"layer {number}" if number >= 0 else f"layer {i} of the encoder"
            streamed = streamed_at(self._units, number + 1) if number >= 0 else 0
            found.append((f"backward of {name}", self._parts(left, room, gradients, streamed)))
            left -= kept[i] - costs.own_input
        return found

    def _embedding(self) -> tuple[str, dict[str, int]]:
        """Gradients of the embedding: two for a weight shared with the head, until they are added."""
        second = self._trained_bytes(self.model.embed_tokens) if self._tied else 0
        return "the embedding's gradient", self._parts(0, second, self.gradients)

    def _optimizer(self) -> tuple[str, dict[str, int]]:
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
            "at work": transient + self._tables + self._dequantised + self.step.float8_copies,
        }

    # -- what they are made of

    @property
    def stages(self) -> list[LayerCosts]:
        """All layers that keep something, in execution order: the encoder's first."""
        return [*self.encoder, *self.layers]

    @property
    def encoder(self) -> list[LayerCosts]:
        """Layers of a trained encoder that receives images."""
        return self._encoder_costs if self._trains[0] else []

    @cached_property
    def _encoder_costs(self) -> list[LayerCosts]:
        shown = self.step.shown
        if not shown.tokens:
            return []
        vision, known, found = self.model.vision, {}, []
        windowed = getattr(vision.spec, "windowed", ())
        for number, layer in enumerate(vision.encoder.layers):
            longest = shown.window if number in windowed else shown.longest
            if (layer.spec, longest) not in known:
                step = replace(self.step, batch=1, seq=shown.tokens, longest=longest, shown=NOTHING)
                step = replace(step, sequence_ranks=1)  # every rank has all images
                known[layer.spec, longest] = LayerCosts.of(layer, step, self.itemsize)
            found.append(known[layer.spec, longest])
        return found

    @cached_property
    def _trains(self) -> tuple[bool, bool]:
        """Whether the encoder is trained, and whether the projector is."""
        if self.model.vision is None:
            return False, False
        vision = self.model.vision
        way = {id(p): p for module in vision.ways_out() for p in module.parameters()}
        encoder = (p for p in vision.encoder.parameters() if id(p) not in way)
        return any(p.requires_grad for p in encoder), any(p.requires_grad for p in way.values())

    @cached_property
    def _edges(self) -> Edges:
        spec, dtype = self.model.spec, self.model.embed_tokens.weight.dtype
        if spec.vision is None or not self.step.shown.tokens:
            return Edges()
        return edges_of(spec.vision, self.step.shown, spec.hidden_size, dtype, self._trains)

    @property
    def _outside_layers(self) -> int:
        """Bytes kept outside of layers: for images, and the input of a norm of the embeddings."""
        edges, spec = self._edges, self.model.spec
        normed = self._stream if (spec.embed_norm or spec.id_norm) is not None and not self._idle else 0
        return self.step.shown.pixels + edges.encoder + edges.projector + edges.language + normed

    @cached_property
    def layers(self) -> list[LayerCosts]:
        """Layers of the language model."""
        known: dict[Any, LayerCosts] = {}
        for layer in self.model.layers:
            if layer.spec not in known:
                known[layer.spec] = LayerCosts.of(layer, self.step, self.itemsize)
        every = [known[layer.spec] for layer in self.model.layers]
        return [*map(frozen.without_gradient, every[: self._idle]), *every[self._idle :]]

    @cached_property
    def _further(self) -> ModuleCosts:
        return ModuleCosts.of(self.model, self.step, self.itemsize)

    @cached_property
    def _idle(self) -> int:
        return 0 if self.step.lora_rank else frozen.layers_without_gradient(self.model)

    @cached_property
    def _tables(self) -> int:
        """Cosine and sine of every position, and per token its id, position and label; with images also the
        image it belongs to.
        """
        shown = self.step.shown
        tokens = self.step.tokens * (24 + sum(4 * rope.dim for rope in self.model.spec.ropes))
        if not shown.tokens:
            return tokens
        blocks = [layer.spec for layer in self.model.vision.encoder.layers]
        ropes = {rope for block in blocks for rope in block.ropes}
        return tokens + 9 * self.step.tokens + shown.tokens * (24 + sum(4 * rope.dim for rope in ropes))

    @property
    def _stream(self) -> int:
        """Bytes of the residual stream."""
        return self.step.tokens * self.model.layers[0].stream_bytes(self.itemsize)

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
        return adapters.elements(self.step, self.model.layers, self._matrices)

    @property
    def _quantisable(self) -> list[Any]:
        """Modules whose linear layers are quantised and adapted."""
        vision, modules = self.model.vision, list(self.model.layers)
        return modules if vision is None else [*modules, *vision.encoder.layers, *vision.ways_out()]

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

    @cached_property
    def _own_gradients(self) -> tuple[list[int], int, list[int]]:
        """Gradients of each encoder layer, the other image parts, and each layer of the language model."""
        gpus, vision = self.step.gpus, self.model.vision
        layers = [self._trained_bytes(layer) // gpus for layer in self.model.layers]
        if vision is None:
            return [], 0, layers
        encoder = [self._trained_bytes(layer) // gpus for layer in vision.encoder.layers]
        return encoder, self._trained_bytes(vision) // gpus - sum(encoder), layers

    @cached_property
    def _gathered(self) -> Gathered | None:
        """The gathered parameters of a sharded model."""
        model, step = self.model, self.step
        if step.gpus == 1 and not any(hasattr(p, "to_local") for p in model.parameters()):
            return None
        layers = [*([] if model.vision is None else model.vision.encoder.layers), *model.layers]
        embedding = model.embed_tokens.weight
        inside = {id(p) for layer in layers for p in layer.parameters()}
        head: Any = getattr(model, "lm_head", None)
        ends = [] if self._tied else [embedding, *([] if head is None else head.parameters())]
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


# Counted once for all batch sizes of a plan.
_OF_PARAMETERS = (
    *("_units", "_weights_on_host"),
    *("_weights", "_adapter_elements", "_matrices", "_headless", "_trained", "_tied", "gradients"),
    *("_own_gradients", "_trains", "_gathered", "_dequantised", "_state_on_host", "_idle"),
)
