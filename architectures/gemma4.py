"""Gemma 4 (Google DeepMind, 2026), its text models: as Gemma 3 with wider heads on layers of full attention,
whose values may be their keys, norms of values too, rotations of a part of those heads' pairs, and a stored
factor behind each layer; in the small ones inputs for each layer, and keys that later layers share; in others
experts beside the MLP.
"""

from dataclasses import replace
from typing import Any

from liger_models.architectures.common import (
    FULL,
    SLIDING,
    activation,
    attention,
    check_groups,
    decoder,
    experts_and_chosen,
    layer_sizes,
    mlp,
    rope,
    share_keys,
    unread_keys,
    windows,
)
from liger_models.architectures.common.images import encoder_attention, language_model
from liger_models.architectures.registry import find_architecture, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.spec import (
    AttentionSpec,
    AxesTable,
    BlockSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    PatchSpec,
    PerLayerInputSpec,
    PlacedPictures,
    PoolProjectorSpec,
    QKNormSpec,
    SharedAttentionSpec,
    VisionSpec,
)

LOCAL: dict[str, Any] = {"layer_type": SLIDING, "local_theta": 1e4}
PARTIAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
WIDE = {"head_dim": 20, "num_key_value_heads": 4}
OLDER = ("rope_local_base_freq", "rope_scaling", "rope_theta")
NAMES = (
    *((".per_layer_inputs.", "."), (".per_layer_input.", ".")),
    *((".moe.router.weight", ".router.proj.weight"), (".moe.", ".")),
)
OF_VISION = (
    *((".qkv_proj.", "."), (".gate_up_proj.", "."), ("_proj.linear.", "_proj.")),  # of clipped ones
    ("_proj.", "_proj.linear."),
    *(("_proj.linear.input_", "_proj.input_"), ("_proj.linear.output_", "_proj.output_")),
    ("encoder.patch_embed.", "vision_tower.patch_embedder.input_proj."),
    ("encoder.table.weight", "vision_tower.patch_embedder.position_embedding_table"),
    ("encoder.layers.", "vision_tower.encoder.layers."),
    ("projector.std_", "vision_tower.std_"),
    ("projector.linear.", "embed_vision.embedding_projection."),
)


@register(
    "gemma4_text",
    reference="Gemma4ForCausalLM",
    layouts=(Layout(NAMES, whole=("*.experts.*",)),),
    carried=unread_keys,
    tiny={
        "hidden_act": ...,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 4,
        "head_dim": 8,
        "attention_bias": True,
        "attention_k_eq_v": True,
        "global_head_dim": 12,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 2.0,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 20,
        "rms_norm_eps": 0.3,
        "vocab_size_per_layer_input": 137,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 3,
        "moe_intermediate_size": 24,
        "sliding_window": 7,
        "layer_types": [SLIDING, FULL] * 2,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    variants={
        "dense": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": False},
        "keys of the last": {"num_hidden_layers": 5, "layer_types": [SLIDING, *[SLIDING, FULL] * 2]},
        "partial": {
            "rope_parameters": {
                "full_attention": {**PARTIAL, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
        "eps": {"rms_norm_eps": 1.0},
        "rope_left_out": {"rope_parameters": ...},
        "by_layer": {"per_layer_config": {"01": WIDE, "3": WIDE}},
        "every_sixth": {
            "num_hidden_layers": 7,
            "layer_types": ...,
            "head_dim": 8,
            "global_head_dim": 8,
            "num_kv_shared_layers": 0,
        },
    },
    fixed={"use_bidirectional_attention": "vision"},  # of images
    skip={
        "rope:all": "the reference runs the proportional type, and by default on sliding layers",
        **{f"key:{key}": "an older spelling, which the reference does not read" for key in OLDER},
        "field:MoESpec.softmax_after_top_k": "the same function as renormalised shares of all",
    },
)
def gemma4_text(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), cast="gemma")
    mixers, inner = share_keys(c, attentions(c, norm)), mlp(c, key="hidden_activation")
    times = 2 if c.take_flag("use_double_wide_mlp", False) else 1
    wide = replace(inner, intermediate_size=inner.intermediate_size * times)
    moe, size = experts(c, norm.eps), c.take_count("hidden_size_per_layer_input", 0, least=0)
    own = PerLayerInputSpec(size, inner.activation) if size else None
    c.take("vocab_size_per_layer_input", None)  # of models without, too
    ids = c.take_count("vocab_size_per_layer_input", least=c.take_count("vocab_size")) if own else None
    blocks = [
        BlockSpec(
            mixer,
            inner if isinstance(mixer, AttentionSpec) else wide,
            norm,
            "scaled_sandwich_with_experts" if moe else "scaled_sandwich",
            experts=moe,
            per_layer_input=own,
        )
        for mixer in mixers
    ]
    return decoder(
        c,
        blocks,
        norm,
        embed_scale=c.take_count("hidden_size") ** 0.5,
        logit_softcap=c.take_number("final_logit_softcapping", None),
        per_layer_vocab_size=ids,
    )


def attentions(c: HFConfig, norm: NormSpec) -> list[AttentionSpec]:
    """Attention of each layer, whose sizes and rotation differ by its type."""
    bias, same = c.take_flag("attention_bias", False), c.take_flag("attention_k_eq_v", False)
    usual = replace(attention(c, bias=bias, **LOCAL), scale=1.0, qk_norm=QKNormSpec(norm, values=True))
    heads = c.take_count("num_global_key_value_heads", usual.num_key_value_heads)
    of_full: dict[str, Any] = {
        "head_dim": c.take_count("global_head_dim", 512),
        "num_key_value_heads": heads if same else usual.num_key_value_heads,
    }
    slides = [*windows(c, lambda i: SLIDING if (i + 1) % 6 else FULL)[:-1], None]  # the last is always full
    sizes = layer_sizes(c, of_full.keys()) or [{} if window else of_full for window in slides]
    mixers = [replace(usual, window=window, **own) for window, own in zip(slides, sizes, strict=True)]
    for i, attn in enumerate(mixers):
        check_groups(c, attn.num_attention_heads, attn.num_key_value_heads)
        if attn.window is None:
            turns = rope(c, attn.head_dim, layer_type=FULL, theta=1e6, scaling=PARTIAL)
        else:  # no distance is longer than the window
            turns = replace(rope(c, attn.head_dim, **LOCAL), max_position_embeddings=None)
        mixers[i] = replace(attn, rope=turns, values_are_keys=same and attn.window is None)
    return mixers


def experts(c: HFConfig, eps: float) -> MoESpec | None:
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        c.take(key, None)  # of models without, too
    if not c.take_flag("enable_moe_block", False):
        return None
    return MoESpec(
        *experts_and_chosen(c, ("num_experts",), ("top_k_experts",)),
        intermediate_size=c.take_count("moe_intermediate_size"),
        activation=activation(c, "hidden_activation"),
        router_norm_eps=eps,
        expert_scale=True,
    )


def carried(c: HFConfig) -> tuple[str, ...]:
    """Patterns of what hears, and of the text's tensors that nothing reads."""
    text = c.with_raw({"model_type": "gemma4_text", **c.raw["text_config"]})
    unread = [f"*language_model.{name.removeprefix('model.')}" for name in unread_keys(text)]
    return ("*audio_tower.*", "*embed_audio.*", *unread)


@register(
    "gemma4",
    reference="Gemma4ForConditionalGeneration",
    tiny={
        "text_config": {
            **find_architecture("gemma4_text").tiny,
            "model_type": "gemma4_text",
            "hidden_act": ...,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "pooling_kernel_size": 2,
            "patch_size": 3,
            "position_embedding_size": 18,
            "rms_norm_eps": 0.3,
            "standardize": True,
        },
        "audio_config": None,
        "image_token_id": 3,
        "video_token_id": 4,
    },
    layouts=tuple(
        Layout(
            NAMES,
            ("*.experts.*",),
            (("vision.encoder.patch_embed.weight", "d (h w c) -> d c h w"),),
            root=f"{root}language_model.",
            parts=(("vision.", Layout(OF_VISION, root=root)),),
        )
        for root in ("model.", "")
    ),
    carried=carried,
    variants={
        "causal, not standardised, clipped": {
            "text_config": {"use_bidirectional_attention": None},
            "vision_config": {
                "standardize": False,
                "num_key_value_heads": 2,
                "use_clipped_linears": True,
            },
        },
    },
)
def gemma4(c: HFConfig) -> ModelSpec:
    """Gemma 4 (Google DeepMind, 2026): Gemma 4's text models with an encoder of images and videos of all
    sizes; the tokens of an image all see one another on sliding layers.
    """
    text, v = language_model(c), c.part("vision_config")
    for key in (
        *("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
        *("audio_token_id", "audio_config", "vision_soft_tokens_per_image"),
    ):
        c.take(key, None)  # which the processor places; and what hears is carried along
    bidirectional = c.raw["text_config"].get("use_bidirectional_attention") is not None
    vision = pooled(
        v,
        c.take_count("image_token_id", 258880, least=0),
        video_id=c.take_count("video_token_id", 258884, least=0),
        spans="images" if bidirectional else None,
    )
    blocks = []
    for block in text.blocks:
        assert isinstance(block.mixer, AttentionSpec | SharedAttentionSpec)
        sees = not bidirectional or block.mixer.window is not None
        blocks.append(replace(block, mixer=replace(block.mixer, sees_spans=sees)))
    return replace(text, blocks=tuple(blocks), vision=vision)


def pooled(v: HFConfig, image_id: int, **settings: Any) -> VisionSpec:
    """The encoder, from its config; `settings` are further fields of the spec."""
    for key in ("max_position_embeddings", "attention_bias", "global_head_dim", "default_output_length"):
        v.take(key, None)  # which the reference does not read, or the processor does
    clipped = v.take_flag("use_clipped_linears", False)
    v.fill({"hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 3072})
    width, heads = v.take_count("hidden_size", 768), v.take_count("num_attention_heads", 12)
    kv_heads, head_dim = v.take_count("num_key_value_heads", 12), v.take_count("head_dim", 64)
    check_groups(v, heads, kv_heads)
    norm = NormSpec(eps=v.take_number("rms_norm_eps", 1e-6), cast="gemma")
    attn = encoder_attention(v, heads * head_dim, heads, theta=100.0)
    assert attn.rope is not None
    assert attn.rope.axes is not None
    rope = replace(attn.rope, axes=tuple(1 - axis for axis in attn.rope.axes), halves=True)
    attn = replace(
        attn,
        num_key_value_heads=kv_heads,
        rope=rope,
        scale=1.0,
        qkv_bias=False,
        o_bias=False,
        qk_norm=QKNormSpec(norm, values=True),
        clipped=clipped,
    )
    inner = replace(mlp(v, key="hidden_activation"), clipped=clipped)
    merge = v.take_count("pooling_kernel_size", 3)
    return VisionSpec(
        width,
        PatchSpec(v.take_count("patch_size", 16)),
        (BlockSpec(attn, inner, norm, "sandwich"),) * v.take_count("num_hidden_layers", 16),
        PoolProjectorSpec(merge, norm.eps, v.take_flag("standardize", False)),
        image_id,
        position_table=AxesTable(v.take_count("position_embedding_size", 10240)),
        pictures=PlacedPictures(),
        kinds="mm_token_type_ids",
        **settings,
    )
