"""Peak memory of one layer during its backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from liger_models.kernels._dispatch import ceil_div
from liger_models.kernels.experts._expert_passes import slice_columns
from liger_models.layers.blocks import Block
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.memory.adapters import AdapterCosts, PeftMoments
from liger_models.layers.memory.mixing import backward_mixing, early_bytes
from liger_models.layers.memory.on_host import heads_at_a_time
from liger_models.layers.memory.own_parts import before_output, decoded_bytes, gradient_bytes
from liger_models.layers.memory.places import inner_width, own_attention, places_of
from liger_models.layers.memory.step import Step
from liger_models.layers.projections.linear import unwrapped
from liger_models.layers.recompute import tiles
from liger_models.layers.recompute.activation_memory import RERUN, TILED, ActivationMemory


@dataclass(frozen=True)
class Moments:
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
    ) -> Moments:
        tokens, mlp = step.tokens, getattr(layer, "mlp", None)
        stream, product = tokens * layer.stream_bytes(itemsize), tokens * itemsize * inner_width(layer)
        connection: Any = getattr(layer, "connection_bytes", None)  # to several streams
        normed = stream if connection is None else tokens * itemsize * layer.hidden_size
        experts, decoded = isinstance(mlp, MixtureOfExperts), decoded_bytes(layer, itemsize)
        if isinstance(mlp, MixtureOfExperts):
            in_mlp = _MLPMoments.of_experts(layer, mlp, step, itemsize, normed, decoded)
        else:
            in_mlp = _MLPMoments.of_dense(layer, mlp, step, itemsize, adapters, decoded)
        mixers: Any = layer.mixers
        in_front = (p for m in mixers for p in before_output(m))
        parameters = [] if mlp is None else list(mlp.parameters())
        of_mlp, whole = (gradient_bytes(parts, step) for parts in (parameters, layer.parameters()))
        attention = max(
            backward_mixing(layer, step, itemsize), _peft_mixer(layer, step, itemsize, adapters)
        ) + max(decoded["mixer"], decoded["output"])
        if connection is not None:  # the streams' gradient waits for attention's, then goes through it
            attention = max(attention + stream, tokens * connection(itemsize))
        return Moments(
            lean=kept["lean"],
            mlp=0 if mlp is None else tokens * mlp.activation_bytes("lean", itemsize),
            product=product,
            norms=tokens * layer.norm_output_bytes(itemsize),
            outer=tokens * layer.norms_after_branches * layer.hidden_size * itemsize,
            stream=stream,
            normed=normed,
            scaled=(layer.spec.residual_scale != 1.0) * stream,
            last=in_mlp.last,
            front=in_mlp.front,
            front_norm=in_mlp.front_norm,
            in_place=0 if step.lora_rank else product * getattr(mlp, "makes_product_in_place", False),
            experts=experts,
            overwritten=in_mlp.overwritten,
            with_norm=experts or not (adapters.trained or "last" in adapters.peft),
            peft=PeftMoments.of(kept, adapters, product, stream) if adapters.peft else None,
            pieces=_pieces(layer, step, itemsize, adapters),
            gradients=(in_mlp.after, of_mlp, whole - gradient_bytes(in_front, step), whole),
            attention=attention,
            early=early_bytes(layer, step, itemsize),
            tile=in_mlp.tile,
            tile_begun=in_mlp.tile_begun,
            moved=in_mlp.moved,
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


@dataclass(frozen=True)
class _MLPMoments:
    """The MLP's part of `Moments`, whose attributes these are; `after`: gradients computed by `last`.

    `decoded` has the bytes of a matrix, or a stack of experts, that quantised bits are decoded to for a
    product.
    """

    last: int
    front: int
    front_norm: int
    after: int
    overwritten: int = 0
    tile: int | None = None
    tile_begun: int = 0
    moved: int = 0

    @staticmethod
    def of_experts(
        layer: Block,
        mlp: MixtureOfExperts,
        step: Step,
        itemsize: int,
        normed: int,
        decoded: Mapping[str, int],
    ) -> _MLPMoments:
        tokens, product = step.tokens, step.tokens * itemsize * inner_width(layer)
        each = mlp.spec.experts_per_token * tokens * itemsize
        rows = each * mlp.spec.input_size(layer.hidden_size)
        first = (2 if mlp.spec.gated else 1) * product  # gradients of gate and up, or of up
        own = unwrapped(mlp.experts)
        frozen = step.lora_rank or not any(p.requires_grad for p in own.parameters(recurse=False))
        last = product + first + (0 if frozen else rows)
        if frozen and own.float8 is None and own.exchange is None:
            rows = min(rows, each * slice_columns(mlp.spec.intermediate_size))
        front = max(rows + first + 2 * normed, tokens * getattr(mlp, "float8_gradient_bytes", 0))
        copied = first // 2 if own.float8 is not None else 0  # of the gradients of gate and up, in float8
        # Decoded stacks are freed before the gradient of the activation, and that of the layer's input, are
        # computed.
        return _MLPMoments(
            last=max(last, last - first + decoded["last"]),
            front=max(front + decoded["front"], rows + first + normed + copied),
            front_norm=normed,
            after=0,
            overwritten=first,
        )

    @staticmethod
    def of_dense(
        layer: Block,
        mlp: nn.Module | None,
        step: Step,
        itemsize: int,
        adapters: AdapterCosts,
        decoded: Mapping[str, int],
    ) -> _MLPMoments:
        tokens, stream = step.tokens, step.tokens * layer.stream_bytes(itemsize)
        product, places = tokens * itemsize * inner_width(layer), places_of(layer)
        parameters = [] if mlp is None else list(mlp.parameters())
        # The gradients of the input of several layers run by PEFT are summed one after the other. With 16
        # bits the last one casts its output's gradient, which is then freed and is larger.
        added = ("front" in adapters.peft and itemsize > 2) * stream
        front = adapters.front.total(stream) + added
        own_last = tiles.LastProduct.of(mlp, product)
        plain = _MLPMoments(
            last=adapters.last.total(product) + own_last.of_all(decoded),
            front=max(front, tokens * getattr(mlp, "float8_gradient_bytes", 0)) + decoded["front"],
            front_norm=min(stream, front - adapters.front.without - added),
            after=gradient_bytes((p for p in parameters if places[id(p)] == "last"), step),
        )
        if mlp is None or tokens <= tiles.TILE:
            return plain
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        elements = 0 if step.lora_rank or adapters.adapted & {"last", "front"} else trained
        size = ceil_div(tokens, ceil_div(tokens, tiles.TILE))
        of_tile, wide = AdapterCosts.of(layer, step, size, itemsize), size * product // tokens
        # Including the input of the activation, twice as wide as its output. In a forward pass that PEFT
        # runs, only half of it exists yet.
        moments = [2 * wide + of_tile.last.total(wide), 2 * wide + of_tile.front.total()]
        moments += [wide + of_tile.front.forward + of_tile.last.begun, 3 * wide + of_tile.last.forward]
        tile = tiles.working_bytes(tokens, 0, elements, itemsize) + max(moments)
        return replace(
            plain,
            tile=tile + own_last.of_tiles(decoded, stream * size // tokens, wide),
            tile_begun=of_tile.last.begun,
            moved=8 * elements * ceil_div(tokens, tiles.TILE),
        )


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
