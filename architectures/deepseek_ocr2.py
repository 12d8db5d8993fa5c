"""DeepSeek-OCR 2 (DeepSeek, 2026): DeepSeek's experts with ordinary attention, for reading documents. In its
encoder learned queries, in causal order, read the features that SAM's encoder makes of images and crops.

The published config in the tests is from memory.
"""

from dataclasses import replace

from liger_models.architectures.common import attention_as_wide_as_the_model, decoder, mlp
from liger_models.architectures.common.deepseek import SHARED_EXPERTS, dense_or_sparse
from liger_models.architectures.common.images import own_text
from liger_models.architectures.deepseek_v2 import LOSS, experts
from liger_models.architectures.encoders import sam
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec

NAMES = (SHARED_EXPERTS, (".router.", ".gate."))
# Of DeepSeek-V2's latent attention and its pretraining.
UNREAD = (
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "use_mla"),
    *("first_k_dense_replace", *LOSS),
)


@register(
    "deepseek_ocr2",
    reference="DeepseekOcr2ForConditionalGeneration",
    vision=True,
    layouts=(
        Layout(NAMES, sam.WHOLE_WITH_QUERIES, sam.PERMUTED_WITH_QUERIES, parts=sam.RELEASED),
        Layout(
            NAMES,
            (*sam.WHOLE_WITH_QUERIES, "*.experts.*"),
            sam.PERMUTED_WITH_QUERIES,
            root="model.language_model.",
            parts=sam.IN_MODULES,
        ),
    ),
)
def deepseek_ocr2(c: HFConfig) -> ModelSpec:
    text = own_text(c)
    for key in UNREAD:
        text.take(key, None)
    text.take_only(scoring_func="softmax", moe_layer_freq=1, norm_topk_prob=False)
    text.take("mlp_layer_types")  # has no default
    norm, bias = NormSpec(eps=text.take_number("rms_norm_eps", 1e-6)), text.take_flag("mlp_bias", False)
    mixer = attention_as_wide_as_the_model(text, bias=text.take_flag("attention_bias", False))
    inner = dense_or_sparse(text, mlp(text, bias=bias), experts(text, bias), 0)
    model = decoder(text, [BlockSpec(mixer, one, norm) for one in inner], norm)
    text.finish()
    image_id = c.take_count("image_token_id", 128815, least=0)
    return replace(model, vision=sam.vision_with_queries(c.part("vision_config"), image_id))


# -- tests

for_tests(
    "deepseek_ocr2",
    tiny={
        "text_config": {
            "model_type": "deepseek_ocr2_text",
            "head_dim": ...,
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 5,
            "routed_scaling_factor": 1.7,
            "rms_norm_eps": 1e-3,
            "topk_method": "greedy",
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "attention_bias": True,
            "mlp_bias": True,
        },
        "vision_config": sam.TINY_WITH_QUERIES,
        "image_token_id": 3,
        "tie_word_embeddings": False,
    },
    variants={
        "in groups": {
            "text_config": {
                "topk_method": "group_limited_greedy",
                "n_group": 4,
                "topk_group": 2,
                "num_experts_per_tok": 3,
            }
        },
    },
    skip={
        "field:CroppedPictures.most": "of the processor: see tests/vision/test_query_encoder.py",
    },
)
