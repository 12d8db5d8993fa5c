"""Memory of adapters per token, in addition to a layer's own activations.

Where our operation runs a layer (layers/projections/low_rank.py), its input is freed once its gradient
exists. For PEFT's own forward see layers/memory/peft_forward.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_models.kernels.experts._expert_paths import padded_rank
from liger_models.layers.experts.moe import Experts
from liger_models.layers.memory.peft_forward import PEFT_FORWARDS
from liger_models.layers.memory.places import PLACES, places_of
from liger_models.layers.memory.step import Step
from liger_models.layers.projections.matrices import matrices
from liger_models.layers.projections.stored_weight import dense_shape
from liger_models.layers.recompute.activation_memory import ActivationMemory


@dataclass(frozen=True)
class Work:
    """Bytes of a linear layer's backward pass in addition to the gradient of its output.

    Attributes:
        with_input: peak while its input is needed, excluding the input.
        without: peak after that.
        forward, kept, begun: of PEFT's own forward, see `PeftForward`.
    """

    with_input: int = 0
    without: int = 0
    forward: int = 0
    kept: int = 0
    begun: int = 0

    def total(self, of_input: int = 0) -> int:
        """Peak for an input of this size."""
        return max(of_input + self.with_input, self.without)

    def most(self, other: Work) -> Work:
        return Work(*map(max, astuple(self), astuple(other)))

    @staticmethod
    def of_peft(linear: _Linear, tokens: int, itemsize: int) -> Work:
        assert linear.peft is not None
        own, size = PEFT_FORWARDS[linear.peft][itemsize > 2], (linear.width, linear.height)
        with_input, without = (
            max((tokens * m.size(*size) for m in own.moments if m.with_input == asked), default=0)
            for asked in (True, False)
        )
        forward, begun = tokens * own.forward.size(*size), tokens * own.begun * linear.height
        kept = tokens * own.kept.size(*size)
        if linear.peft.startswith("dora"):
            cast, dropout = itemsize <= 2, "dropout" in linear.peft
            row = tokens * linear.height
            if linear.bias and not dropout:  # the output of W without it
                forward += row * itemsize
            # In float32, beyond the unit matrix that gives B A: B A and a copy of W, and while the norms are
            # computed, when only the output of W exists, also s B A and the sum.
            matrix = 4 * linear.width * linear.height
            afterwards, norms = (1 + cast) * matrix, (3 + cast) * matrix
            norms += tokens * own.forward.per_input * linear.width + row * itemsize
            # The second run holds the unit matrix and the mask of dropout. It stops before the last product
            # and sum.
            held = 4 * linear.width**2 + 4 * tokens * linear.width * dropout
            with_input = max(with_input, begun + held + max(forward - 8 * row + afterwards, norms))
            forward = max(forward + afterwards, norms)
            kept += matrix * (cast and dropout)  # a second product with W
        return Work(with_input, without, forward, kept, begun)


@dataclass(frozen=True)
class AdapterCosts:
    """Memory of the adapters in a layer.

    Attributes:
        columns: of the low-rank paths' t = x A^T, kept if the layer is not recomputed.
        last, front, mixer, output: peak of a single linear layer: of the MLP's last product, of its first
            ones, of the mixer's inputs and of its output.
        later_mixer: of the mixer's inputs but the first, whose backward pass comes last.
        trained: the weight of the last product is trained.
        peft: which of the four have layers that run PEFT's own forward.
        adapted: which of the four have adapters.
        keeps_input: which of the four have layers that keep their input at the level `all`.
        kept: bytes that PEFT's own forwards keep at that level.
    """

    columns: int
    last: Work
    front: Work
    mixer: Work
    later_mixer: Work
    output: Work
    trained: bool
    peft: frozenset[str]
    adapted: frozenset[str]
    keeps_input: frozenset[str]
    kept: int

    @staticmethod
    def of(layer: nn.Module, step: Step, tokens: int, itemsize: int) -> AdapterCosts:
        """Costs of a layer's adapters, present or planned, for this many tokens."""
        work, later = dict.fromkeys(PLACES, Work()), Work()
        columns = kept = 0
        trained: set[str] = set()
        peft: set[str] = set()
        adapted: set[str] = set()
        keeps_input: set[str] = set()
        for linear in _linears(layer, step):
            here, dx = {linear.place}, tokens * itemsize * linear.width
            if linear.peft is not None:
                own = Work.of_peft(linear, tokens, itemsize)
                peft |= here
                keeps_input |= here if PEFT_FORWARDS[linear.peft][itemsize > 2].kept.with_input else set()
            elif linear.eight_bits:  # its own dx and that of the paths
                own = Work(with_input=2 * dx)
            else:  # a trained weight needs its input while dx exists
                own = Work(with_input=dx) if linear.trained else Work(without=dx)
                keeps_input |= here if linear.trained or linear.adapted else set()
            trained |= here if linear.trained else set()
            adapted |= here if linear.adapted else set()
            columns, kept = columns + linear.rank, kept + own.kept
            if linear.place == "mixer" and work["mixer"] != Work():
                later = later.most(own)
            work[linear.place] = work[linear.place].most(own)
        last, front, mixer, output = (work[place] for place in PLACES)
        places = frozenset(peft), frozenset(adapted), frozenset(keeps_input)
        return AdapterCosts(columns, last, front, mixer, later, output, "last" in trained, *places, kept)


@dataclass(frozen=True)
class PeftMoments:
    """Bytes of further moments, if some of a layer's linear layers run PEFT's own forward.

    Attributes:
        at_all: peak at the level `all`, which recomputes nothing.
        output: peak in the forward pass of attention's output, beyond what `lean` keeps of attention, a
            norm's output and the stream.
        forward: peak in the forward pass of the MLP, beyond what `lean` keeps and the norm's output.
        again: peak when the MLP's first products are recomputed after the backward pass of its last one has
            begun, beyond what `lean` keeps of attention, the norm's output and the stream's gradient.
    """

    at_all: int
    output: int
    forward: int
    again: int

    @staticmethod
    def of(
        kept: dict[ActivationMemory, int], adapters: AdapterCosts, product: int, stream: int
    ) -> PeftMoments:
        last, *others = (
            work.total() - work.kept
            for work in (adapters.last, adapters.front, adapters.mixer, adapters.output)
        )
        return PeftMoments(
            kept["all"] + 2 * stream + max(last, max(others) - adapters.last.kept),
            adapters.output.forward,
            product + adapters.last.forward,
            product + adapters.front.forward + adapters.last.begun,
        )


def elements(step: Step, modules: Iterable[nn.Module]) -> int:
    """Elements of a step's planned adapters: on the linear layers of these modules, where each part of a
    packed projection has its own, and, if it says so, on their stacks of experts.
    """
    every = {id(p): (owner, name, p) for module in modules for owner, name, p in matrices(module)}
    found = 0
    for owner, name, p in every.values():
        if p.ndim == 2 and (p.requires_grad or p.dtype == torch.uint8):
            rows, columns = dense_shape(owner, name)
            found += sum(height + columns for height in _heights(owner, rows))
        elif isinstance(owner, Experts) and step.lora_experts:
            experts, rows, columns = dense_shape(owner, name)
            found += experts * (rows + columns)
    return step.lora_rank * found


class _Linear(NamedTuple):
    """A linear layer: its place, whether its weight is trained, the rank of its paths, the PEFT forward that
    runs it, if any, and whether it has a bias.
    """

    place: str
    width: int
    height: int
    trained: bool = False
    adapted: bool = False
    rank: int = 0
    peft: str | None = None
    eight_bits: bool = False
    bias: bool = False


def _linears(layer: nn.Module, step: Step) -> Iterator[_Linear]:
    inside: set[str] = set()
    places = places_of(layer)
    for name, module in layer.named_modules():
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue  # parts of an adapted layer
        own: Any = module
        place = places.get(id(module), "mixer")
        if hasattr(module, "adapter_costs"):
            inside.add(name)
            sizes, costs = (place, own.in_features, own.out_features), own.adapter_costs()
            yield _Linear(*sizes, adapted=True, bias=_has_bias(own), **costs)
        elif isinstance(module, nn.Linear):
            heights = _heights(own, own.out_features)
            if not step.lora_rank:
                yield _Linear(place, own.in_features, sum(heights), own.weight.requires_grad)
                continue
            of_adapter: dict[str, Any] = {"rank": step.lora_rank, "eight_bits": step.weight_bytes == 1}
            if step.dora:
                of_adapter = {"peft": "dora", "bias": _has_bias(own)}
            for height in heights:
                yield _Linear(place, own.in_features, height, adapted=True, **of_adapter)
        elif isinstance(module, Experts) and step.lora_experts:
            rank = module.spec.experts_per_token * padded_rank([step.lora_rank])
            for stack in (getattr(module, module.first), module.down_proj):
                yield _Linear(place, stack.shape[2], stack.shape[1], adapted=True, rank=rank)


def _heights(linear: nn.Module, rows: int) -> list[int]:
    """Rows of each part of a linear layer."""
    return [*getattr(linear, "parts", {}).values()] or [rows]


def _has_bias(linear: nn.Module) -> bool:
    return getattr(linear, "bias", None) is not None
