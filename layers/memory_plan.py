"""What a training step takes of a GPU's memory, and the levels of activation memory with which it fits.

A step's memory is largest in one of these moments:

| moment               | beside the weights and the optimizer's state                                        |
|----------------------|-------------------------------------------------------------------------------------|
| the loss             | what every layer keeps, a chunk of logits, the head's gradient                      |
| backward of a layer  | what it and the layers before it keep, what it makes again, the gradients behind it |
| the optimizer's step | all gradients                                                                       |

`choose_levels` begins with everything kept, and while the largest is above the budget gives up, in one layer
after the other, what costs the least work for each byte that it saves: down to `checkpoint`; if that does not
fit, down to `tiled`; and if that does not, to `offload`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from liger_models.convert.sizes import parse_size
from liger_models.kernels.losses._linear_chunks import working_bytes
from liger_models.layers import tiles
from liger_models.layers.activation_memory import LEVELS, RERUN, ActivationMemory
from liger_models.layers.attention_backends import LONG
from liger_models.layers.blocks import Block
from liger_models.layers.moe import MixtureOfExperts
from liger_models.layers.offload import host_bytes, host_memory_left
from liger_models.layers.sequence_parallel import exchange_bytes
from liger_models.layers.sequences import Sequences
from liger_models.layers.spec import AttentionSpec, ModelSpec, MoESpec

_log = logging.getLogger("liger_models")

# Operations of a matrix product in the time that a byte takes to be written or read: 660 TFLOP/s beside 4.2
# TB/s on an H200. It decides only which of two things is done again first.
OPERATIONS_A_BYTE = 160
# Of elementwise work that is done again: its output is written, and about twice as much is read.
BYTES_MOVED = 3

# The levels among which is chosen: the first row with which a step fits.
LADDERS: tuple[tuple[ActivationMemory, ...], ...] = (
    ("all", "lean", "mlp", "checkpoint"),
    ("all", "lean", "mlp", "tiled"),
    ("all", "lean", "mlp", "offload"),
)


class Planned(Protocol):
    """What a plan asks of a model, as a decoder has it."""

    spec: ModelSpec
    layers: Sequence[Block]
    embed_tokens: nn.Embedding

    def parameters(self) -> Iterator[nn.Parameter]:
        """All of them, a tied one once."""


@dataclass(frozen=True)
class Step:
    """What a training step is, beside its model.

    Attributes:
        batch, seq: rows, and tokens in a row, that one GPU has at a time.
        optimizer_bytes: state of each trained element. AdamW in bfloat16 keeps two moments, and by default 16
            bits that rounding would lose.
        accumulates: whether gradients of an earlier micro-batch are there in the forward pass.
        gpus: that divide the parameters among them (FSDP2).
        lora_rank: of adapters on all linear layers, in float32, beside weights that are not trained; 0: none.
        weight_bytes: of an element of the layers' matrices, where they are quantised.
        longest: tokens of the longest document; None: `seq`.
        sequence_ranks: GPUs that divide these rows among them, a part of the tokens each.
        optimizer_on_host: whether the optimizer's state is in the host's memory.
        optimizer_work: bytes that the optimizer's step takes beside the state and the gradients.
    """

    batch: int
    seq: int
    optimizer_bytes: float = 6
    accumulates: bool = False
    gpus: int = 1
    lora_rank: int = 0
    weight_bytes: float | None = None
    longest: int | None = None
    sequence_ranks: int = 1
    optimizer_on_host: bool = False
    optimizer_work: int = 0

    @property
    def tokens(self) -> int:
        """Of one GPU."""
        return -(-self.batch * self.seq // self.sequence_ranks)


@dataclass(frozen=True)
class Plan:
    """The levels of a model's layers, and the memory of a step with them.

    Attributes:
        levels: one a layer.
        peak: bytes at the largest moment.
        moment: which that is.
        parts: what the peak is made of, in bytes.
        repeated: the matrix products and other work done again, over those of a step that repeats nothing.
        budget: the bytes that there are; None: any number.
        host: bytes of the host's memory, pinned, for what is kept there.
        host_budget: the bytes of that that there are; None: any number.
    """

    levels: tuple[ActivationMemory, ...]
    peak: int
    moment: str
    parts: dict[str, int] = field(hash=False)
    repeated: float
    budget: int | None = None
    host: int = 0
    host_budget: int | None = None

    @property
    def fits(self) -> bool:
        on_host = self.host_budget is None or self.host <= self.host_budget
        return on_host and (self.budget is None or self.peak <= self.budget)

    def __str__(self) -> str:
        runs: list[list[Any]] = []
        for i, level in enumerate(self.levels):
            if not runs or runs[-1][0] != level:
                runs.append([level, i, i])
            runs[-1][2] = i
        layers = ", ".join(f"{level} in layers {first} to {last}" for level, first, last in runs)
        budget = "" if self.budget is None else f" of {self.budget / 2**30:.1f}"
        most = "" if self.host_budget is None else f" of {self.host_budget / 2**30:.1f}"
        host = f", and {self.host / 2**30:.1f}{most} GiB of the host" if self.host else ""
        peak = f"{self.peak / 2**30:.1f}{budget} GiB{host}"
        return f"{layers}; {self.repeated:.1%} of the work is repeated; {peak}"


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

    def resized(self, batch: int, seq: int) -> StepMemory:
        """The same step with other rows: what does not depend on them is not counted again."""
        other = StepMemory(self.model, replace(self.step, batch=batch, seq=seq))
        vars(other).update((name, vars(self)[name]) for name in _OF_PARAMETERS if name in vars(self))
        return other

    def plan(
        self,
        levels: Sequence[ActivationMemory],
        budget: int | None = None,
        host_budget: int | None = None,
    ) -> Plan:
        """The memory of a step with these levels, beside the bytes that there are."""
        kept = [costs.kept[level] for costs, level in zip(self.layers, levels, strict=True)]
        moments = [self._loss(kept), *self._backward(kept, levels), self._optimizer()]
        moment, parts = max(moments, key=lambda found: sum(found[1].values()))
        repeated = sum(costs.work[level] for costs, level in zip(self.layers, levels, strict=True))
        share = repeated / (3 * sum(costs.forward for costs in self.layers) + self._head_work)
        host = levels.count("offload") * host_bytes(self._stream) + self._state_on_host
        return Plan(tuple(levels), sum(parts.values()), moment, parts, share, budget, host, host_budget)

    def choose_levels(self, budget: int, host_budget: int | None = None) -> Plan:
        """The levels that repeat the least work among those tried with which the step fits; if it does not,
        those with the lowest peak.
        """
        plans: list[Plan] = []
        for ladder in LADDERS:
            plans += self._descend(ladder, budget, host_budget)
            fitting = [plan for plan in plans if plan.fits]
            if fitting:
                return min(fitting, key=lambda plan: plan.repeated)
        return min(plans, key=lambda plan: plan.peak)

    def _descend(
        self, ladder: Sequence[ActivationMemory], budget: int, host_budget: int | None
    ) -> list[Plan]:
        """One level for all, and the way from the first level down to where a step fits."""
        plans = [self.plan([level] * len(self.layers), budget, host_budget) for level in ladder]
        plan, levels = plans[0], list(plans[0].levels)
        while not plan.fits:
            found = [costs.next_of(level, ladder) for costs, level in zip(self.layers, levels, strict=True)]
            further = [(price, i, to) for i, (price, to) in enumerate(found) if to is not None]
            if not further:
                break
            # Of equal layers the first one: what it keeps, it keeps the longest.
            _, i, to = min(further)
            levels[i] = to
            plan = self.plan(levels, budget, host_budget)
            plans.append(plan)
        return plans

    # -- the moments

    def _loss(self, kept: list[int]) -> tuple[str, dict[str, int]]:
        step, spec = self.step, self.model.spec
        trained = step.lora_rank == 0 and self.model.embed_tokens.weight.requires_grad
        room = working_bytes(step.tokens, spec.hidden_size, spec.vocab_size, self.itemsize, trained)
        gradients = self.gradients if step.accumulates else 0
        return "the loss", self._parts(sum(kept), room + self._ends, gradients)

    def _backward(
        self, kept: list[int], levels: Sequence[ActivationMemory]
    ) -> list[tuple[str, dict[str, int]]]:
        found = []
        gradients = self.gradients if self.step.accumulates else self.gradients - sum(self._layer_gradients)
        if not self.step.accumulates and not self._tied:  # the embedding's comes last
            gradients -= self._trained_bytes(self.model.embed_tokens) // self.step.gpus
        left = sum(kept)
        for i in reversed(range(len(kept))):
            if not self.step.accumulates:
                gradients += self._layer_gradients[i]
            room = self.layers[i].transient[levels[i]] + self._ends
            if levels[i] == "offload" and "offload" in levels[:i]:  # whose input is fetched
                room += self._stream
            found.append((f"backward of layer {i}", self._parts(left, room, gradients)))
            left -= kept[i]
        return found

    def _optimizer(self) -> tuple[str, dict[str, int]]:
        return "the optimizer's step", self._parts(
            0, min(self.step.optimizer_work, self._state), self.gradients
        )

    def _parts(self, activations: int, transient: int, gradients: int) -> dict[str, int]:
        return {
            "weights": self._weights,
            "optimizer": 0 if self.step.optimizer_on_host else self._state,
            "gradients": gradients,
            "activations": activations,
            "at work": transient + self._tables + self._gathered + self._dequantised,
        }

    # -- what they are made of

    @cached_property
    def layers(self) -> list[_LayerCosts]:
        known: dict[Any, _LayerCosts] = {}
        for layer in self.model.layers:
            if layer.spec not in known:
                known[layer.spec] = _LayerCosts.of(layer, self.step, self.itemsize)
        return [known[layer.spec] for layer in self.model.layers]

    @cached_property
    def _tables(self) -> int:
        """Cosine and sine of every position, and of every token its id, its place and its label."""
        return self.step.tokens * (24 + sum(4 * rope.dim for rope in self.model.spec.ropes))

    @property
    def _stream(self) -> int:
        """Bytes of the residual stream."""
        return self.step.tokens * self.model.spec.hidden_size * self.itemsize

    @property
    def _ends(self) -> int:
        """The residual stream where a layer begins and ends, and its gradient."""
        return 3 * self._stream

    @cached_property
    def _tied(self) -> bool:
        return self.model.spec.tie_word_embeddings

    @cached_property
    def _weights(self) -> int:
        total = sum(_bytes(p) for p in self.model.parameters())
        if self.step.weight_bytes is not None:
            elements = sum(p.numel() for p in self._matrices)
            total += int(elements * (self.step.weight_bytes - self.itemsize))
        return (total + self._headless * self.itemsize) // self.step.gpus + 4 * self._adapter_elements

    @cached_property
    def _adapter_elements(self) -> int:
        return sum(self.step.lora_rank * sum(p.shape) for p in self._matrices)

    @cached_property
    def _matrices(self) -> list[Tensor]:
        return [p for layer in self.model.layers for p in layer.parameters() if p.ndim == 2]

    @cached_property
    def _headless(self) -> int:
        """Elements of the head of a decoder that is held by another model, which has it."""
        has_head = self._tied or hasattr(self.model, "lm_head")
        return 0 if has_head else self.model.spec.vocab_size * self.model.spec.hidden_size

    @cached_property
    def _trained(self) -> int:
        """Elements."""
        if self.step.lora_rank:
            return self._adapter_elements
        own = sum(_elements(p) for p in self.model.parameters() if p.requires_grad)
        return own + (self._headless if self.model.embed_tokens.weight.requires_grad else 0)

    @property
    def _state(self) -> int:
        """Bytes of the optimizer's."""
        return int(self._trained * self.step.optimizer_bytes / self.step.gpus)

    @cached_property
    def _state_on_host(self) -> int:
        """As it is pinned: each of its tensors takes a power of two."""
        if not self.step.optimizer_on_host:
            return 0
        sizes = [_bytes(p) for p in self.model.parameters() if p.requires_grad]
        return int(self._state * sum(1 << (size - 1).bit_length() for size in sizes) / max(1, sum(sizes)))

    def _trained_bytes(self, module: Any) -> int:
        if self.step.lora_rank:
            return 0
        return sum(_bytes(p) for p in module.parameters() if p.requires_grad)

    @cached_property
    def gradients(self) -> int:
        """Bytes of all of them."""
        if self.step.lora_rank:
            return 4 * self._adapter_elements
        headless = self._headless * self.itemsize if self.model.embed_tokens.weight.requires_grad else 0
        return (self._trained_bytes(self.model) + headless) // self.step.gpus

    @cached_property
    def _layer_gradients(self) -> list[int]:
        return [self._trained_bytes(layer) // self.step.gpus for layer in self.model.layers]

    @cached_property
    def _gathered(self) -> int:
        """Divided parameters, whole: the two layers at work and the next, with one layer's gradients; the
        embedding and the head from the forward pass to the end.
        """
        if self.step.gpus == 1 and not any(hasattr(p, "to_local") for p in self.model.parameters()):
            return 0
        layers = [sum(map(_gathered_bytes, layer.parameters())) for layer in self.model.layers]
        return 3 * max(layers) + sum(map(_gathered_bytes, self.model.parameters())) - sum(layers)

    @cached_property
    def _dequantised(self) -> int:
        """A quantised matrix as it is multiplied with."""
        if self.step.weight_bytes is None:
            return 0
        return max(p.nbytes for p in self._matrices)

    @cached_property
    def _head_work(self) -> int:
        spec = self.model.spec
        return 6 * self.step.tokens * spec.hidden_size * spec.vocab_size


# What a plan counts once for all sizes of a batch.
_OF_PARAMETERS = (
    *("_weights", "_adapter_elements", "_matrices", "_headless", "_trained", "_tied", "gradients"),
    *("_layer_gradients", "_gathered", "_dequantised", "_state_on_host"),
)


class FittingLevels:
    """Chooses a decoder's levels when it first meets a batch to train on, and again when one has more tokens.

    Args:
        budget: what the process may take of the GPU: bytes, text such as "120GiB", or a share up to 1 of what
            it could have when it is first asked; None: 0.95 of that.
        optimizer_bytes: the optimizer's state of each trained element. Default: that of
            `liger_models.optim.AdamW`, by the parameters' dtypes. 0 if it is on the host.
        say: told what was chosen. Default: the log "liger_models", as information.

    Raises:
        ValueError: a budget that is none of these.
    """

    def __init__(
        self,
        budget: float | str | None = None,
        optimizer_bytes: float | None = None,
        say: Callable[[str], object] | None = None,
    ):
        self.share, self.budget = parse_budget(budget)
        self.optimizer_bytes = optimizer_bytes
        self.say = say or _log.info
        self.tokens = 0
        self.plan: Plan | None = None

    def __call__(self, model: Planned, sequences: Sequences) -> None:
        """Choose for this batch, if it has more tokens than those before.

        Of a model that is divided over processes all choose alike, and once: when each has met its first
        batch.

        Raises:
            ValueError: there is no GPU whose memory could be measured, and no budget in bytes.
        """
        divided = sequences.slice is not None  # ranks that exchange heads must run the same layers again
        shared = divided or any(hasattr(p, "to_local") for p in model.parameters())
        tokens = sequences.whole.num_tokens
        if tokens <= self.tokens or (shared and self.plan is not None):
            return
        weight = model.embed_tokens.weight
        budget = self.budget if self.budget is not None else self._measured(model, weight.device)
        host_budget = host_memory_left()
        if shared:
            agreed = torch.tensor([tokens, -budget, -host_budget], device=weight.device)
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX)
            tokens, budget, host_budget = int(agreed[0]), -int(agreed[1]), -int(agreed[2])
        per_element = self.optimizer_bytes
        if per_element is None:
            per_element = _adamw_bytes(model.parameters())
        accumulates = any(p.grad is not None for p in model.parameters())
        step = Step(
            *(1, tokens, per_element, accumulates),
            longest=sequences.max_seqlen,
            sequence_ranks=sequences.slice.ranks if sequences.slice is not None else 1,
        )
        self.tokens, self.plan = tokens, StepMemory(model, step).choose_levels(budget, host_budget)
        for layer, level in zip(model.layers, self.plan.levels, strict=True):
            layer.set_activation_memory(level)
        self.say(f"activation memory for {tokens:,} tokens: {self.plan}")
        if not self.plan.fits:
            _log.warning("a step of %d tokens does not fit in memory_budget at any level", tokens)

    def _measured(self, model: Planned, device: torch.device) -> int:
        """What this step may take: the share of the GPU, without what else the process holds there."""
        if device.type != "cuda":
            raise ValueError(
                f"activation_memory='auto' measures a GPU, and the model is on {device}; give memory_budget "
                "in bytes, or choose one of " + ", ".join(LEVELS)
            )
        free, _ = torch.cuda.mem_get_info(device)
        mine = torch.cuda.memory_reserved(device)
        others = torch.cuda.memory_allocated(device) - sum(
            _bytes(p) + (0 if p.grad is None else _bytes(p.grad)) for p in model.parameters()
        )
        return int(self.share * (free + mine)) - max(others, 0)


def parse_budget(budget: float | str | None) -> tuple[float, int | None]:
    """A share of the GPU, and bytes if they were given: (0.95, None), (0.8, None), (1.0, 128849018880).

    Raises:
        ValueError: it is neither.
    """
    if budget is None:
        return 0.95, None
    with contextlib.suppress(ValueError):  # text with a unit is no number
        if 0 < float(budget) <= 1:
            return float(budget), None
    try:
        return 1.0, parse_size(str(budget))
    except ValueError as error:
        raise ValueError(
            f"memory_budget is {budget!r}; expected bytes, text such as '120GiB', or a share such as 0.9"
        ) from error


@dataclass(frozen=True)
class _LayerCosts:
    """Of a layer, by level: what it keeps, what it needs beside that while its backward pass runs, and the
    work of making again what it does not keep. Bytes, and operations; of all tokens of a step.
    """

    kept: dict[ActivationMemory, int]
    transient: dict[ActivationMemory, int]
    work: dict[ActivationMemory, int]
    forward: int

    @staticmethod
    def of(layer: Block, step: Step, itemsize: int) -> _LayerCosts:
        tokens = step.tokens
        kept = {level: tokens * layer.activation_bytes(level, itemsize) for level in LEVELS}
        if step.sequence_ranks > 1:
            exchanged = tokens * exchange_bytes(layer.spec.mixer, step.sequence_ranks, itemsize)
            kept = {level: kept[level] + (level not in RERUN) * exchanged for level in LEVELS}
        inner, last, rest = matrix_elements(layer)
        mixing = 4 * _attended(layer, step.longest or step.seq)
        again = OPERATIONS_A_BYTE * BYTES_MOVED * (kept["all"] - kept["lean"])
        # Behind gate and up their product and its gradient, as wide as either.
        product = tokens * itemsize * _inner_width(layer)
        whole = again + tokens * (2 * (inner + rest) + mixing)
        tiled, sums = _in_tiles(layer, kept["all"], step, itemsize)
        stream = tokens * itemsize * layer.hidden_size
        return _LayerCosts(
            kept,
            {
                "all": product,
                "lean": 2 * product,
                "mlp": 4 * product,
                "checkpoint": kept["all"],
                # The layer's own input is kept, or came back from the host.
                "tiled": tiled - (stream if step.tokens > tiles.TILE else 0),
                "offload": tiled,
            },
            {
                "all": 0,
                "lean": again,
                "mlp": again + 2 * tokens * inner,
                "checkpoint": whole,
                "tiled": whole + OPERATIONS_A_BYTE * sums,
                "offload": whole + OPERATIONS_A_BYTE * sums,
            },
            tokens * (2 * (inner + last + rest) + mixing),
        )

    def next_of(
        self, level: ActivationMemory, ladder: Sequence[ActivationMemory]
    ) -> tuple[float, ActivationMemory | None]:
        """The level further down to which a saved byte costs the least work, and that price."""
        found = [
            ((self.work[to] - self.work[level]) / (self.kept[level] - self.kept[to]), to)
            for to in ladder[ladder.index(level) + 1 :]
            if self.kept[to] < self.kept[level]
        ]
        return min(found, default=(0.0, None))


def _in_tiles(layer: Block, whole: int, step: Step, itemsize: int) -> tuple[int, int]:
    """What a layer needs for its backward pass whose MLP runs in tiles and which else needs `whole`; and the
    bytes of float32 sums that are moved. Experts are not in tiles.
    """
    if step.tokens <= tiles.TILE or isinstance(layer.mlp, MixtureOfExperts):
        return whole, 0
    spec, elements = layer.mlp.spec, 0
    if step.lora_rank == 0:
        elements = sum(p.numel() for p in layer.mlp.parameters() if p.requires_grad)
    # Of a tile: what stands before the activation, what comes out, and the gradients of both.
    of_tiles = tiles.working_bytes(step.tokens, 4 * spec.intermediate_size, elements, itemsize)
    rest = whole - step.tokens * layer.mlp.activation_bytes("all", itemsize)
    # In attention the MLP's norm is done with, and the streams in front of it and behind it.
    attention = rest - 4 * step.tokens * layer.hidden_size * itemsize + _attention_work(layer, step, itemsize)
    return max(rest + of_tiles, attention), 8 * elements * -(-step.tokens // tiles.TILE)


def _attention_work(layer: Block, step: Step, itemsize: int) -> int:
    """The gradients of attention's output, queries, keys and values, and what `sdpa` takes to make them:
    sums in float32, and keys' and values' gradients by query head.
    """
    mixer: Any = layer.spec.mixer
    mixer = getattr(mixer, "attention", mixer)
    if not isinstance(mixer, AttentionSpec):
        return 0
    gradients = 2 * itemsize * (mixer.q_size + mixer.kv_size)
    sums = 0
    if mixer.window is None and mixer.softcap is None and not mixer.sinks:
        by_head = 2 * itemsize if mixer.num_key_value_heads < mixer.num_attention_heads else 0
        sums = (4 + by_head) * mixer.q_size
    if step.tokens > LONG:
        sums //= mixer.num_key_value_heads
    return step.tokens * (gradients + sums)


def matrix_elements(layer: Block) -> tuple[int, int, int]:
    """Elements of the matrices that a token meets: of gate and up, of the last product, of all others."""
    inner = last = rest = 0
    for name, p in layer.named_parameters():
        if p.ndim < 2:
            continue
        mixture, elements = layer.spec.mixture, p.numel()
        if p.ndim == 3 and mixture is not None:
            elements = elements * mixture.experts_per_token // mixture.num_experts
        if not name.startswith("mlp."):
            rest += elements
        elif "down_proj" in name:
            last += elements
        else:
            inner += elements
    return inner, last, rest


def _attended(layer: Block, seq: int) -> int:
    """Elements of the values that a query meets, over all heads, on average."""
    mixer: Any = layer.spec.mixer
    mixer = getattr(mixer, "attention", mixer)
    if not isinstance(mixer, AttentionSpec):
        return 0
    return mixer.q_size * min(mixer.window or mixer.chunk or seq, (seq + 1) // 2)


def _inner_width(layer: Block) -> int:
    spec = layer.spec.mlp
    if not isinstance(spec, MoESpec):
        return spec.intermediate_size
    shared = 0 if spec.shared_expert is None else spec.shared_expert.intermediate_size
    return spec.experts_per_token * spec.intermediate_size + shared


def _adamw_bytes(parameters: Iterator[nn.Parameter]) -> float:
    """What AdamW keeps of a trained element, on average: two moments, and 16 further bits of a bfloat16."""
    trained = [p for p in parameters if p.requires_grad]
    state = sum(_elements(p) * (6 if p.dtype.itemsize == 2 else 2 * p.dtype.itemsize) for p in trained)
    return state / max(1, sum(_elements(p) for p in trained))


def _local(p: Tensor) -> Tensor:
    """What this process has of a parameter that is divided over several."""
    return p.to_local() if hasattr(p, "to_local") else p


def _bytes(p: Tensor) -> int:
    return _local(p).nbytes


def _gathered_bytes(p: Tensor) -> int:
    """Of a parameter that is divided, when it is at work: of experts that ranks hold apart, these alone, and
    nothing more than they are where nothing else divides them.
    """
    mesh: Any = getattr(p, "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if "experts" not in names:
        return p.nbytes
    return 0 if len(names) == 1 else p.nbytes // mesh.size(names.index("experts"))


def _elements(p: Tensor) -> int:
    return _local(p).numel()


def largest(fits: Callable[[int], bool], start: int = 1, most: int = 1 << 40) -> int:
    """The largest number up to `most` for which `fits(number)` holds, to a part in 256; 0 if it does not hold
    for `start`. Below a number for which it holds it is taken to hold.
    """
    if not fits(start):
        return 0
    low, high = start, 2 * start
    while high < most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
