"""A model's layers as a picture: one column per kind of layer, read from the spec.

The residual stream goes down the left side of a column. Each branch reads it, and what it computes is added.
"""

from __future__ import annotations

from collections import Counter

from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    ChannelDeltaSpec,
    CompressedAttentionSpec,
    ConvolvedAttentionSpec,
    CrossAttentionSpec,
    DifferentialAttentionSpec,
    GatedConvSpec,
    GatedDeltaSpec,
    LatentAttentionSpec,
    LayerNormSpec,
    LightningSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    RGLRUSpec,
    SelectiveSpec,
    SharedAttentionSpec,
    SSDSpec,
)
from liger_models.pictures.svg import GREY, INK, box, line, text

# The steps of each branch, by topology (layers/blocks). Steps in a tuple run side by side, and are added.
BRANCHES: dict[str, list[list[str | tuple[str, ...]]]] = {
    "pre_norm": [["norm", "mixer"], ["norm", "mlp"]],
    "from_norms": [["norm", "mixer"], ["norm", "mlp"]],
    "mlp_norm": [["mixer"], ["norm", "mlp"]],
    "convolved": [["norm", "mixer", "convolution"], ["norm", "mlp", "convolution"]],
    "shared_latents": [["norm", "mixer"], ["norm", "mlp"]],
    "layer_scale": [["norm", "mixer", "scale"], ["norm", "mlp", "scale"]],
    "gated_pre_norm": [["norm", "mixer", "gate"], ["norm", "mlp", "gate"]],
    "gated_cross": [["norm", "mixer", "gate"], ["norm", "mlp", "gate"]],
    "sandwich": [["norm", "mixer", "norm"], ["norm", "mlp", "norm"]],
    "scaled_sandwich": [["norm", "mixer", "norm"], ["norm", "mlp", "norm"], ["per-layer input"]],
    "scaled_sandwich_with_experts": [
        ["norm", "mixer", "norm"],
        ["norm", ("mlp", "experts"), "norm"],
        ["per-layer input"],
    ],
    "post_norm": [["mixer", "norm"], ["mlp", "norm"]],
    "normed_sums": [["mixer", "norm of the sum"], ["mlp", "norm of the sum"]],
    "parallel": [["norm", ("mixer", "mlp")]],
    "parallel_two_norms": [[("norm", "norm"), ("mixer", "mlp")]],
    "one_part": [["norm", "part"]],
    "shortcut": [["norm", "mixer"], ["norm", ("mlp", "experts")]],
    "side_by_side": [["norm", ("mixer", "second mixer")], ["norm", "mlp"]],
    "shared_transformer": [["norm", "second mixer", "norm", "mlp", "norm", "mixer"]],
    "conformer": [["norm", "mlp"], ["norm", "mixer"], ["norm", "second mixer"], ["norm", "mlp"]],
    "conformer_sandwich": [
        ["norm", "mlp", "norm"],
        ["norm", "mixer", "norm"],
        ["norm", "second mixer"],
        ["norm", "mlp", "norm"],
    ],
    "hyper_connected": [["sum of streams", "norm", "mixer"], ["sum of streams", "norm", "mlp"]],
    "gated_streams": [["n-grams"], ["norm", "mean of streams", "mixer"], ["norm", "mean of streams", "mlp"]],
    "altup": [
        ["prediction", "norm", ("mixer", "low rank"), "norm"],
        ["norm", "mlp", "norm"],
        ["correction of all streams"],
        ["per-layer input"],
    ],
}
MIXERS = {
    LatentAttentionSpec: "latent attention",
    DifferentialAttentionSpec: "differential attention",
    CrossAttentionSpec: "attention to images",
    SharedAttentionSpec: "attention to shared keys",
    GatedDeltaSpec: "gated delta rule",
    ChannelDeltaSpec: "Kimi delta attention",
    SSDSpec: "Mamba 2",
    SelectiveSpec: "Mamba",
    GatedConvSpec: "gated short convolution",
    LightningSpec: "lightning attention",
    RGLRUSpec: "gated recurrence",
}
FILLS = {"norm": "#e8e8e8", "scale": "#e8e8e8", "gate": "#e8e8e8", "mixer": "#cfe2f3", "mlp": "#fce5cd"}
COLUMN, MOST = 230, 3  # width of a column, and number of columns
HIGH, LOW = 36, 22  # heights of boxes with and without details


Step = tuple[tuple[str, str, str], ...]  # boxes side by side: what they are, a name and details
Look = tuple[tuple[Step, ...], ...]


def layers(spec: ModelSpec, top: float = 0) -> tuple[list[str], float, float]:
    """Elements of the picture from `top` on, its width, and the height where it ends."""
    kinds = Counter(look(block) for block in spec.blocks).most_common()
    made: list[str] = []
    bottom = top
    for column, (kind, count) in enumerate(kinds[:MOST]):
        drawn, end = _column(kind, f"{count} layer{'s' * (count > 1)}", 12 + column * COLUMN, top)
        made += drawn
        bottom = max(bottom, end)
    if rest := sum(count for _, count in kinds[MOST:]):
        made.append(
            text(12, bottom + 14, f"and {rest} layers of {len(kinds) - MOST} further kinds", colour=GREY)
        )
        bottom += 22
    return made, 24 + COLUMN * min(len(kinds), MOST), bottom


def look(block: BlockSpec) -> Look:
    """The appearance of a layer; layers that look the same are drawn once."""
    steps = BRANCHES[block.topology]
    if block.per_layer_input is None:
        steps = [branch for branch in steps if branch != ["per-layer input"]]
    if block.ngrams is None:
        steps = [branch for branch in steps if branch != ["n-grams"]]
    return tuple(tuple(_step(block, step) for step in branch) for branch in steps)


def _step(block: BlockSpec, step: str | tuple[str, ...]) -> Step:
    return tuple(_box(block, name) for name in (step if isinstance(step, tuple) else (step,)))


def _box(block: BlockSpec, name: str) -> tuple[str, str, str]:
    norm = "LayerNorm" if isinstance(block.norm, LayerNormSpec) else "RMSNorm"
    if name == "part":
        name = "mlp" if block.mixer is None else "mixer"
    match name:
        case "norm":
            return "norm", norm, ""
        case "mixer":
            return "mixer", *_mixer(block.mixer)
        case "second mixer":
            return "mixer", *_mixer(block.second_mixer)
        case "mlp":
            return "mlp", *_mlp(block.mlp)
        case "experts" if block.topology == "shortcut" and block.experts is None:
            return "mlp", "experts", "of the layer before"
        case "experts" if block.topology == "shortcut":
            return "mlp", "experts", f"{_mlp(block.experts)[1]}, added one layer later"
        case "experts":
            return "mlp", *_mlp(block.experts)
    return "other", name, ""


def _mixer(mixer: object) -> tuple[str, str]:
    if isinstance(mixer, CompressedAttentionSpec):
        return f"attention, window {mixer.window:,}", _compressed(mixer)
    if isinstance(mixer, ConvolvedAttentionSpec):
        window = "" if mixer.window is None else f", window {mixer.window:,}"
        return (
            f"attention{window}",
            f"{mixer.num_attention_heads} heads, {mixer.num_key_value_heads} KV, convolved",
        )
    if not isinstance(mixer, AttentionSpec):
        shared = getattr(mixer, "latents_of", None) is not None
        return MIXERS[type(mixer)], "latents of another layer" if shared else ""
    name = "attention" if mixer.window is None else f"attention, window {mixer.window:,}"
    details = [f"{mixer.num_attention_heads} heads"]
    if mixer.num_key_value_heads < mixer.num_attention_heads:
        details.append(f"{mixer.num_key_value_heads} KV")
    traits: dict[str, object] = {"QK-norm": mixer.qk_norm, "sinks": mixer.sinks, "gate": mixer.gate_size}
    traits |= {"ALiBi": bool(mixer.slopes), "NoPE": not mixer.rope and not mixer.slopes}
    traits |= {"indexer": mixer.indexer}
    return name, ", ".join([*details, *(name for name, has in traits.items() if has)])


def _compressed(mixer: CompressedAttentionSpec) -> str:
    """Details of attention to compressed keys."""
    heads = f"{mixer.num_attention_heads} heads, 1 KV"
    if mixer.compressor is None:
        return f"{heads}, sinks"
    chosen = "" if mixer.indexer is None else f"{mixer.indexer.top_k} of "
    return f"{heads}, sinks, {chosen}keys of {mixer.compressor.rate} tokens"


def _mlp(mlp: object) -> tuple[str, str]:
    if isinstance(mlp, MoESpec):
        shared = ", one shared" if mlp.shared_expert else ""
        shared += "" if mlp.by_token_id is None else ", by token id"
        shared += f", {mlp.sink_experts} sinks" if mlp.sink_experts else ""
        own = ", others of pictures" if mlp.image_size else ""
        return "experts", f"{mlp.experts_per_token} of {mlp.num_experts}{own}{shared}"
    assert isinstance(mlp, MLPSpec)
    return ("gated MLP" if mlp.gated else "MLP"), f"{mlp.activation}, {mlp.intermediate_size:,} wide"


def _column(kind: Look, words: str, x: float, top: float) -> tuple[list[str], float]:
    """One kind of layer: the residual stream on the left, and its branches."""
    stream, left, width = x + 14, x + 34, COLUMN - 50
    made = [text(x, top + 14, words, size=13)]
    y = begin = top + 24
    for branch in kind:
        middle = left + width / 2
        made += [line(stream, y + 8, middle, y + 8), line(middle, y + 8, middle, y + 14)]
        y += 14
        for step in branch:
            part = (width - 6 * (len(step) - 1)) / len(step)
            high = HIGH if any(details for _, _, details in step) else LOW
            for number, (what, name, details) in enumerate(step):
                at = left + number * (part + 6)
                made.append(
                    box(at, y, part, high, FILLS.get(what, FILLS["norm"]), f"{name} {details}".strip())
                )
                made.append(text(at + part / 2, y + 15, _cut(name, part, 12), "middle", INK))
                if details:
                    made.append(text(at + part / 2, y + 29, _cut(details, part, 10), "middle", GREY, 10))
            y += high + 6
        made += [
            line(middle, y - 6, middle, y + 4),
            line(middle, y + 4, stream + 8, y + 4),
            f'<circle cx="{stream:g}" cy="{y + 4:g}" r="8" stroke="{GREY}" fill="none"/>',
            text(stream, y + 8, "+", "middle"),
        ]
        y += 16
    return [line(stream, begin, stream, y + 6), *made], y + 12


def _cut(words: str, width: float, size: int) -> str:
    """Shorten a text to fit a box, whose title has all of it. A letter is about half as wide as high."""
    most = int(width / (0.53 * size))
    return words if len(words) <= most else f"{words[: most - 1]}…"
