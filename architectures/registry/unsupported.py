"""Known families that are not supported, and the missing features that each needs: those that transformers
has as causal or image-text models, and others that their publishers' code has.

    liger-models list --missing
"""

MISSING: dict[str, str] = {
    "rwkv": "the recurrence of RWKV",
    "xlstm": "the matrix memories of xLSTM",
    "zamba": "heads of state-space layers (Mamba), and attention whose weights several layers share",
}
"""The missing part, by `model_type`. An entry goes when its family is registered."""

_ENCODER_BLOCKS = "the blocks of an encoder (BERT), which transformers can also run as a decoder"
_ENCODER_DECODER = "an encoder, and cross-attention to it"
_SEES = "its image encoder"
_Q_FORMER = "a projector whose queries attend to the features of images (Q-Former)"
_CODES = "images as tokens of a learned codebook (VQ-VAE)"
_TIMM = "an image encoder from the package timm"
_HEARS = "its audio encoder"

MISSING |= {
    "blt": "models of bytes and of patches of them, with cross-attention between",
    "cpmant": "learned biases by distance",
    "ctrl": "sinusoidal positions with frequencies of its own",
    "doge": "attention biased by learned functions of the values, and experts chosen by products of keys",
    "gpt-sw3": "the model type gpt2 in config.json, as its checkpoints have",
    "hrm_text": "two stacks of layers that run in turns, several times each, with gradients by turn",
    "jetmoe": "mixtures of attention heads",
    "xlnet": "attention in permuted orders",
    "reformer": "attention within hashed buckets",
    "zaya": "attention on convolved, compressed projections",
    "inkling2_text": "attention over the outputs of earlier layers, and convolutions by token",
    "xlm": "learned positions and languages, next to norms after each sum",
    "apertus1p5_text": "a head with fewer rows than the table of embeddings",
    "apertus1p5": "images and sounds as tokens of learned codebooks",
    "dory": "residual streams of unit length (nGPT), and layers that run several times",
    "inkling2_loop_text": "the parts of inkling2_text, and layers that loop",
    "granite_docling": "image tokens at two resolutions, between which a router chooses",
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), _Q_FORMER),
    **dict.fromkeys(("chameleon", "emu3", "janus"), _CODES),
    **dict.fromkeys(("fast_vlm", "perception_lm"), _TIMM),
    "idefics": "cross-attention to the features of images, resampled by queries",
    "video_llava": "two encoders, of images and of videos",
    "shieldgemma2": "a classifier of images around Gemma 3",
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
            *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
            *("xlm-roberta", "xlm-roberta-xl", "xmod"),
        ),
        _ENCODER_BLOCKS,
    ),
    **dict.fromkeys(
        (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "florence2", "marian", "mbart"),
            *("mvp", "musicgen", "musicgen_melody", "pegasus", "pix2struct", "plbart", "pp_formulanet"),
            *("prophetnet", "t5gemma2", "trocr", "udop", "vision-encoder-decoder", "whisper"),
        ),
        _ENCODER_DECODER,
    ),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "the keys and values of the model that it drafts for; it has none of its own to train",
    ),
    "gemma4_unified_text": "the whole model's config, of the type gemma4_unified, which loads",
    **dict.fromkeys(("dots3_note", "moshi", "moss_transcribe_diarize"), _HEARS),
    **dict.fromkeys(("muse_spark", "omniasr"), _HEARS),
    "phi4mm": "adapters within its weights, of which the inputs choose one; the revision refs/pr/70 of its "
    "repository, of the type phi4_multimodal, has them in folders of their own, and loads",
    **dict.fromkeys(
        (
            *("blip", "cosmos3_edge", "cosmos3_omni", "deepseek_vl_hybrid"),
            *("diffusion_gemma", "evolla", "fuyu", "git", "glmga"),
            *("hy_v4_vl", "inkling2", "inkling2_loop", "inkling_mm_model", "kosmos-2", "kosmos-2.5", "pi0"),
            *("pp_chart2table", "unlimited_ocr"),
        ),
        _SEES,
    ),
}
