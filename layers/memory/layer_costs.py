"""Costs of a layer by level: memory kept, memory needed, and work of recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from liger_models.kernels._dispatch import ceil_div
from liger_models.kernels.experts._expert_passes import slice_columns
from liger_models.layers.blocks import Block
from liger_models.layers.blocks.per_layer_input import PerLayerInput
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.memory.adapters import AdapterCosts, PeftMoments
from liger_models.layers.memory.mixing import (
    backward_mixing,
    early_bytes,
    mixing_operations,
    saved_by_segments,
)
from liger_models.layers.memory.on_host import heads_at_a_time, input_bytes, result_bytes
from liger_models.layers.memory.own_parts import before_output, decoded_bytes, gradient_bytes, kept_of_images
from liger_models.layers.memory.places import inner_width, matrix_elements, own_attention, places_of
from liger_models.layers.memory.step import Step
from liger_models.layers.projections.linear import unwrapped
from liger_models.layers.recompute import tiles
from liger_models.layers.recompute.activation_memory import LEVELS, ON_HOST, RERUN, TILED, ActivationMemory
from liger_models.layers.recompute.offload import host_bytes
from liger_models.layers.sequences.sequence_parallel import exchange_bytes

# Matrix operations in the time in which one byte is written or read: 660 TFLOP/s and 4.2 TB/s on an H200.
# Only used to decide what is recomputed first.
OPERATIONS_A_BYTE = 160
# The same for a byte that is copied to the host or back, mostly hidden by computation: the copies of
# Llama-3-8B's inputs take 1.6% of a step of 4 x 4,096 tokens on an H200.
OPERATIONS_A_COPIED_BYTE = 1600
# Of a byte at the level `lean@host`, whose copies run while other layers compute: 22 GB of them made the same
# step of 1,351 ms less than 2 ms slower.
OPERATIONS_A_HIDDEN_BYTE = 60
# Of recomputed elementwise work: its output is written, and about twice as much is read.
BYTES_MOVED = 3


@dataclass(frozen=True)
class LayerCosts:
    """Costs of a layer by level: bytes kept, further bytes needed in its backward pass besides its gradients,
    and operations of recomputation, for all tokens of a step.

    Attributes:
        own_input: bytes of `kept` for the layer's own input. One operation makes these inputs for all layers,
            so they are freed once the backward pass has left layer 0.
        own_gradient: bytes of that input's gradient, which waits for the same moment.
        on_host: host memory at the level `offload`: of the layer's input, and of attention's results.
        work_with_results: operations of recomputation at that level, if these results are kept.
        saved_on_host: host memory at the level `lean@host`.
        at_end: bytes needed at the end of its forward pass at `lean`, if its backward pass may need less: its
            MLP's product and output, a norm's output and the previous layer's contribution to the stream.
        running: bytes needed in its forward pass in addition to what it keeps.
    """

    kept: dict[ActivationMemory, int]
    transient: dict[ActivationMemory, int]
    work: dict[ActivationMemory, int]
    forward: int
    stream: int
    own_input: int = 0
    own_gradient: int = 0
    on_host: tuple[int, int] = (0, 0)
    work_with_results: int = 0
    at_end: int = 0
    saved_on_host: int = 0
    running: dict[ActivationMemory, int] = field(default_factory=dict)

    @staticmethod
    def of(layer: Block, step: Step, itemsize: int) -> LayerCosts:
        """Costs of a layer over all tokens of a step."""
        tokens = step.tokens
        kept = {level: tokens * layer.activation_bytes(level, itemsize) for level in LEVELS}
        if step.sequence_ranks > 1:
            way = step.sequence_ranks, itemsize, step.pass_states
            exchanged = tokens * sum(exchange_bytes(spec, *way) for spec in layer.spec.mixers)
            kept = {level: kept[level] + (level not in RERUN) * exchanged for level in LEVELS}
        kept = {
            level: kept[level] - (level not in RERUN) * saved_by_segments(layer, step) for level in LEVELS
        }
        adapters = AdapterCosts.of(layer, step, tokens, itemsize)
        of_images = kept_of_images(layer, step, itemsize)
        extra = of_images + tokens * adapters.columns * itemsize
        kept = {level: kept[level] + (level not in RERUN) * extra for level in LEVELS}
        kept["all"] += adapters.kept - tokens * _unkept(layer, adapters, itemsize)
        masks = 0 if layer.branch_dropout is None else 2 * tokens * layer.hidden_size
        kept[ON_HOST] = kept["offload"] + masks + of_images
        leaving = kept["lean"] - kept[ON_HOST]
        inner, last, rest = matrix_elements(layer)
        mixing = mixing_operations(layer, step.longest or step.seq)
        again = OPERATIONS_A_BYTE * BYTES_MOVED * (kept["all"] - kept["lean"])
        whole = again + tokens * (2 * (inner + rest) + mixing)
        stream = tokens * layer.stream_bytes(itemsize)
        moments = _Moments.of(layer, kept, step, itemsize, adapters)
        divided = step.sequence_ranks > 1
        results = result_bytes(layer, tokens, step.longest or step.seq, itemsize, divided)
        offloaded = whole + OPERATIONS_A_BYTE * moments.moved + OPERATIONS_A_COPIED_BYTE * 2 * stream
        largest = {level: moments.largest("lean" if level == ON_HOST else level) for level in kept}
        if layer.float32_stream and itemsize < 4:  # `lean` saves it rounded, so this one is in addition
            largest |= {level: largest[level] + stream for level in ("checkpoint", "tiled")}
        if hasattr(layer, "connection_bytes"):  # a layer that runs again makes all of its streams once more
            largest |= {level: largest[level] + stream for level in RERUN}
        own: PerLayerInput | None = getattr(layer, "per_layer_input", None)
        return LayerCosts(
            kept,
            {level: largest[level] - kept[level] for level in kept},
            {
                "all": 0,
                "lean": again,
                "mlp": again + 2 * tokens * inner,
                "checkpoint": whole,
                "tiled": whole + OPERATIONS_A_BYTE * moments.moved,
                "offload": offloaded,
                ON_HOST: again + OPERATIONS_A_HIDDEN_BYTE * 2 * leaving,
            },
            tokens * (2 * (inner + last + rest) + mixing),
            stream,
            0 if own is None else tokens * own.activation_bytes("checkpoint", itemsize),
            0 if own is None else tokens * own.spec.size * itemsize,
            (input_bytes(layer, tokens, itemsize), results),
            offloaded - (tokens * mixing if results else 0) + OPERATIONS_A_COPIED_BYTE * 2 * results,
            moments.in_place and moments.in_place + 3 * stream,
            host_bytes(leaving),
            {level: moments.forward(level, largest[level], results) - kept[level] for level in kept},
        )

    def with_input(self, size: int) -> LayerCosts:
        """Costs with an input of other bytes."""
        levels: tuple[ActivationMemory, ...] = ("checkpoint", "tiled")
        kept = self.kept | {level: self.kept[level] + size - self.stream for level in levels}
        return replace(self, kept=kept, stream=size)

    def repeated(self, level: ActivationMemory, keeps_results: bool) -> int:
        """Operations of recomputation, with attention's results on the host if they are kept."""
        return self.work_with_results if level == "offload" and keeps_results else self.work[level]

    def next_of(
        self, level: ActivationMemory, ladder: Sequence[ActivationMemory], keeps_results: bool
    ) -> tuple[float, ActivationMemory | None]:
        """The lower level that costs the least work per saved byte, and that price."""
        found = [
            ((self.repeated(to, keeps_results) - self.work[level]) / (self.kept[level] - self.kept[to]), to)
            for to in ladder[ladder.index(level) + 1 :]
            if self.kept[to] < self.kept[level]
        ]
        return min(found, default=(0.0, None))


@dataclass(frozen=True)
class _Moments:
    """Peak memory of one layer during its backward pass. S is the bytes of the residual stream, P those of
    the input of the MLP's last product, and R the total rows of the experts:

    | step                    | beyond what `lean` keeps and the stream's gradient   | gradients missing     |
    |-------------------------|------------------------------------------------------|-----------------------|
    | the MLP's last product  | P and its gradient, or P in place of it; adapters    | all but the product's |
    | the MLP's first ones    | the norm's output and its gradient, S each, adapters | those after the MLP   |
    | the experts' activation | its gradient, and two times [R, I], which a layer    | all                   |
    |                         | that runs again has; if trained, [R, H]              |                       |
    | the experts' input      | it, its gradient, [R, H], or if frozen a slice of    | those after them      |
    |                         | it, and two times [R, I] as before                   |                       |
    | an MLP in tiles         | it, its gradient, a tile, sums in float32; no P      | all                   |
    | attention               | see `backward_mixing`; nothing of the MLP            | those before it       |

    By then, everything that a level does not keep has been recomputed, except for outputs of norms: `all`
    keeps them, and a layer that runs again computes each when a product needs it.

    Attributes:
        lean: bytes that the layer keeps at that level.
        mlp: the MLP's part of these.
        product: the input of the MLP's last product: P.
        norms: of norms' outputs.
        outer: of the inputs of norms after the branches, which are freed before attention's backward pass.
        scaled: of the gradient of the MLP's contribution to the stream, if it is scaled. (If a norm follows
            the MLP, it takes the place of that norm's input.)
        last, front: of the MLP's last product and of its first ones, or of the experts' activation and input.
        front_norm: the norm's output in `front`.
        in_place: of P, if at `lean` it takes the place of its gradient.
        experts: `last` and `front` are those of experts.
        overwritten: bytes of both that take the memory of recomputed tensors, if the layer runs again.
        with_norm: the norm's output also exists during `last`: experts read it. If the last product's weight
            is not trained, the peak is at the end of the forward pass, while the previous layer's
            contribution to the stream still exists.
        peft: further moments, if some layers run PEFT's own forward.
        pieces: attention's output by groups of heads, if it is concatenated once more.
        gradients: of the layer's parameters, counted separately: those computed by `last`, by `front` and by
            attention's backward pass, and all.
        attention: of attention's backward pass.
        early: further bytes of it, in layers that do not run again.
        tile: of a tile, including the sums; None: the MLP is not tiled.
        tile_begun: of a tile when its backward pass runs the layer again, see `PeftForward`.
        moved: bytes of sums that are moved.
        accumulates: gradients of an earlier micro-batch exist, to which these are added.
        one_part: there is no MLP: the stream's gradient takes the place of no stream between two parts.
    """

    lean: int
    mlp: int
    product: int
    norms: int
    outer: int
    stream: int
    normed: int  # a norm's output, or its gradient
    scaled: int
    last: int
    front: int
    front_norm: int
    in_place: int
    experts: bool
    overwritten: int
    with_norm: bool
    peft: PeftMoments | None
    pieces: int
    gradients: tuple[int, int, int, int]
    attention: int
    early: int
    tile: int | None
    tile_begun: int
    moved: int
    accumulates: bool
    one_part: bool

    @staticmethod
    def of(
        layer: Block,
        kept: dict[ActivationMemory, int],
        step: Step,
        itemsize: int,
        adapters: AdapterCosts,
    ) -> _Moments:
        tokens, mlp = step.tokens, getattr(layer, "mlp", None)
        stream, product = tokens * layer.stream_bytes(itemsize), tokens * itemsize * inner_width(layer)
        connection: Any = getattr(layer, "connection_bytes", None)  # to several streams
        normed = stream if connection is None else tokens * itemsize * layer.hidden_size
        places = places_of(layer)
        in_mlp = [] if mlp is None else list(mlp.parameters())
        after = gradient_bytes((p for p in in_mlp if places[id(p)] == "last"), step)
        mixers: Any = layer.mixers
        in_front = (p for m in mixers for p in before_output(m))
        of_mlp, whole = (gradient_bytes(parts, step) for parts in (in_mlp, layer.parameters()))
        last = adapters.last.total(product)
        own_last = tiles.LastProduct.of(mlp, product)
        # The gradients of the input of several layers run by PEFT are summed one after the other. With 16
        # bits the last one casts its output's gradient, which is then freed and is larger.
        added = ("front" in adapters.peft and itemsize > 2) * stream
        front = adapters.front.total(stream) + added
        front_norm = min(stream, front - adapters.front.without - added)
        experts, tile, tile_begun, moved, rows, first = isinstance(mlp, MixtureOfExperts), None, 0, 0, 0, 0
        if isinstance(mlp, MixtureOfExperts):
            each = mlp.spec.experts_per_token * tokens * itemsize
            rows = each * mlp.spec.input_size(layer.hidden_size)
            first = (2 if mlp.spec.gated else 1) * product  # gradients of gate and up, or of up
            own = unwrapped(mlp.experts)
            frozen = step.lora_rank or not any(p.requires_grad for p in own.parameters(recurse=False))
            last, after = product + first + (0 if frozen else rows), 0
            if frozen and own.float8 is None and own.exchange is None:
                rows = min(rows, each * slice_columns(mlp.spec.intermediate_size))
            front, front_norm = rows + first + 2 * normed, normed
        elif mlp is not None and tokens > tiles.TILE:
            trained = sum(p.numel() for p in mlp.parameters() if p.requires_grad)
            elements = 0 if step.lora_rank or adapters.adapted & {"last", "front"} else trained
            size = ceil_div(tokens, ceil_div(tokens, tiles.TILE))
            of_tile, wide = AdapterCosts.of(layer, step, size, itemsize), size * product // tokens
            # Including the input of the activation, twice as wide as its output. In a forward pass that PEFT
            # runs, only half of it exists yet.
            moments = [2 * wide + of_tile.last.total(wide), 2 * wide + of_tile.front.total()]
            moments += [wide + of_tile.front.forward + of_tile.last.begun, 3 * wide + of_tile.last.forward]
            tile = tiles.working_bytes(tokens, 0, elements, itemsize) + max(moments)
            tile_begun = of_tile.last.begun
            moved = 8 * elements * -(-tokens // tiles.TILE)
        front = max(front, tokens * getattr(mlp, "float8_gradient_bytes", 0))
        # A matrix, or a stack of experts, that quantised bits are decoded to for a product. Stacks are freed
        # before the gradient of the activation, and that of the layer's input, are computed.
        decoded = decoded_bytes(layer, itemsize)
        if experts:
            last = max(last, last - first + decoded["last"])
            copied = first // 2 if own.float8 is not None else 0  # of the gradients of gate and up, in float8
            front = max(front + decoded["front"], rows + first + normed + copied)
        else:
            last, front = last + own_last.of_all(decoded), front + decoded["front"]
        tile = None if tile is None else tile + own_last.of_tiles(decoded, stream * size // tokens, wide)
        attention = max(
            backward_mixing(layer, step, itemsize), _peft_mixer(layer, step, itemsize, adapters)
        ) + max(decoded["mixer"], decoded["output"])
        if connection is not None:  # the streams' gradient waits for attention's, then goes through it
            attention = max(attention + stream, tokens * connection(itemsize))
        return _Moments(
            lean=kept["lean"],
            mlp=0 if mlp is None else tokens * mlp.activation_bytes("lean", itemsize),
            product=product,
            norms=tokens * layer.norm_output_bytes(itemsize),
            outer=tokens * layer.norms_after_branches * layer.hidden_size * itemsize,
            stream=stream,
            scaled=(layer.spec.residual_scale != 1.0) * stream,
            last=last,
            front=front,
            front_norm=front_norm,
            in_place=0 if step.lora_rank else product * getattr(mlp, "makes_product_in_place", False),
            experts=experts,
            overwritten=first,
            with_norm=experts or not (adapters.trained or "last" in adapters.peft),
            peft=PeftMoments.of(kept, adapters, product, stream) if adapters.peft else None,
            pieces=_pieces(layer, step, itemsize, adapters),
            gradients=(after, of_mlp, whole - gradient_bytes(in_front, step), whole),
            attention=attention,
            early=early_bytes(layer, step, itemsize),
            normed=normed,
            tile=tile,
            tile_begun=tile_begun,
            moved=moved,
            accumulates=step.accumulates,
            one_part=mlp is None,
        )

    def forward(self, level: ActivationMemory, backward: int, results: int) -> int:
        """Peak bytes of a forward pass, or those of the backward pass if only they are known. At the end of a
        dense MLP these exist: its input and output, the outputs of both norms and of attention's projection,
        and the stream before and after attention. Attention's `results` are on their way to the host.
        """
        if level not in RERUN or self.experts or self.tile is not None:
            return backward
        return self.mlp + self.product + 6 * self.stream + (level == "offload") * results

    def largest(self, level: ActivationMemory) -> int:
        """Peak bytes, minus gradients not computed yet."""
        there, norm = self.lean + self.stream, self.normed
        after, of_mlp, all_after, whole = self.gradients
        if self.accumulates:  # all exist; and each new one in addition to the sum
            of_mlp, all_after, whole = of_mlp - after, 0, 0
        attention = self.lean - self.mlp - self.outer + self.attention + self.one_part * self.stream
        attention += all_after - whole
        attention += min(self.norms, self.stream) * (level == "all") + self.early * (level not in RERUN)
        without_mlp = self.lean - self.mlp + norm
        if self.peft is not None:
            if level == "all":
                return self.peft.at_all - whole
            # In a forward pass the stream's sum and its two terms exist; at the level `offload`, one of them
            # in the room for the fetched input of the backward pass. There a tile has begun.
            more = max(self.tile_begun, 0 if level == "offload" else self.stream)
            attention = max(attention, without_mlp + more + self.peft.output + self.pieces - whole)
        if level in TILED and self.tile is not None:
            mlp = without_mlp + 2 * self.stream + self.scaled + self.tile - whole
            return max(mlp + self.pieces, attention)
        if self.peft is not None:
            again = without_mlp + self.stream + self.peft.again
            forward = self.lean + norm + self.peft.forward
            attention = max(attention, (forward if level == "lean" else again) - whole)
        if level == "all":
            there, norm = there + self.norms, 0
        last = there + self.last + self.scaled + (norm if self.with_norm or level == "mlp" else 0)
        if self.with_norm and not self.experts and level not in RERUN:
            last += self.stream
        last -= self.in_place * (level == "lean")
        front = there + self.front - max(0, self.front_norm - norm)
        if level == "mlp":  # holds the norm's output, the input that runs again
            front += self.normed - self.front_norm
        if level == "mlp" or level in RERUN:
            last, front = last - self.overwritten, front - self.overwritten
        return max(last + after - whole, front + of_mlp - whole, attention)


def _unkept(layer: Block, adapters: AdapterCosts, itemsize: int) -> int:
    """Bytes per token of inputs counted at the level `all` that are not kept: PEFT keeps a cast instead, or
    nothing if the weight is not trained.
    """
    if not adapters.peft or layer.norm_outputs() != 2 or isinstance(layer.mlp, MixtureOfExperts):
        return 0
    sizes = {"last": inner_width(layer), "front": layer.hidden_size, "mixer": layer.hidden_size}
    return itemsize * sum(size for place, size in sizes.items() if place not in adapters.keeps_input)


def _peft_mixer(layer: Block, step: Step, itemsize: int, adapters: AdapterCosts) -> int:
    """Memory of PEFT's own forward of attention's projections: of the output, whose input is kept; and of
    queries, keys and values, after that output is done, beyond the norm's output.
    """
    mixer, output = own_attention(layer), adapters.output.total() if "output" in adapters.peft else 0
    done = 0 if mixer is None else step.tokens * itemsize * mixer.o_size
    if "mixer" not in adapters.peft:
        return output
    last = adapters.mixer.total(stream := step.tokens * itemsize * layer.hidden_size)
    if mixer is not None and itemsize <= 2:  # the last one casts and frees the gradients of all
        last -= step.tokens * itemsize * (mixer.q_size + mixer.kv_size + mixer.v_size)
    return max(output, stream + max(last, adapters.later_mixer.total(stream)) - done)


def _pieces(layer: Block, step: Step, itemsize: int, adapters: AdapterCosts) -> int:
    """Attention's output of long sequences, computed by groups of heads (`attend_by_groups`): a following
    layer with adapters needs it concatenated.
    """
    mixer = own_attention(layer)
    if mixer is None or "output" not in adapters.adapted:
        return 0
    grouped = heads_at_a_time(layer.token_mixer, step.tokens, step.sequence_ranks > 1) > 1
    return step.tokens * itemsize * mixer.o_size * grouped
