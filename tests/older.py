"""Releases of transformers that differ from 5.23, which the tests follow: patterns of tests that are skipped
with older and with later ones, and models that other code has under the same name, each with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

FOLLOWED = (5, 23)
QUARTER = "(stablelm|qwen3_next|qwen3_5_text|qwen3_5_moe_text)"
TWO_QUARTERS = (
    "writes the default of partial_rotary_factor in addition to the value in rope_parameters, and from_hub "
    "refuses contradictions"
)
LOADS = "(adapters_of_families|checkpoints|checkpoint_tensors|generation|models|quantization)"
ROUTED = "(granitemoe(_swa|shared)?|dbrx)"
READS_CHECKPOINTS = "(a_checkpoint_of_the_reference|the_reference_reads|verify_accepts|configs_spelled)"
OF_PIXELS = "(may_mix|without_padding|with_padding|gives_its_logits|reference_reads|gradient_match)"
OF_TOWERS = (
    "(may_mix|without_padding|gives_its_logits|byte_for_byte|reference_reads|gradient_match|files_equal|"
    "hidden_states|matches_its_reference|as_accurate)"
)
READS_A_TEXT_PART = "(the_|newer_|a_head|an_unknown_tensor)"
BESIDE = "has the towers of omni thinkers beside the model"
WHISPERS = "(qwen2_audio|voxtral|audioflamingo3|musicflamingo|glmasr|granite_speech(_plus)?)"
ANOTHER_ROOT = "writes the text part under language_model.model.model"
OTHERWISE = {
    rf"\[{ROUTED}-(output_router_logits=True|together)\]|router_loss\w*\[{ROUTED}\]": "fails to add the "
    "loss of routers",
    rf"test_checkpoints\.py::test_{READS_CHECKPOINTS}\w*\[{QUARTER}\]": TWO_QUARTERS,
    rf"tests/hf/test_{LOADS}\.py.*\[{QUARTER}[-\]]": TWO_QUARTERS,
    r"tests/vision/test_(checkpoints|in_transformers)\.py.*\[qwen3_5(_moe)?[-\]]": TWO_QUARTERS,
    r"override_the_checkpoints\w*\[glm-": "adds the default of partial_rotary_factor to given settings",
    r"\[gemma-(hidden_act|together)\]": "has another form of gelu",
    r"\[minimax_m2-rotary_dim\]": "does not read rotary_dim",
    r"\[gemma3n_text-fewer_ids\]": "looks up ids beyond the table of inputs per layer",
    r"\[mimo_v2_flash-as released\]": "does not read sliding_window_size",
    r"test_dropout\.py::test_the_same_random\w*\[opt\]": "draws a number for layerdrop of 0, too",
    r"four_bits\w*\[aria_text\]": "has a linear layer as router, which bitsandbytes quantises",
    r"embeddings_in_place_of_ids_agree\[gemma4_text\]": "has another signature for inputs per layer",
    r"norms_round_where\w*\[(nemotron_h|deepseek_v4)\]": "rounds elsewhere",
    r"\[granitemoehybrid-older_names\]|null_key\w*\[granitemoehybrid\]": "refuses older names of layer types",
    r"(every_key|another_value)\w*\[gpt_oss\]": "has constants for swiglu_alpha and swiglu_limit",
    r"\[IQuest-Coder|a_class_that_several_families_share": "does not have the family",
    rf"tests/vision/.*{OF_PIXELS}\w*\[paddleocr_vl[-\]]": "aligns the corners of the table of positions",
    rf"tests/vision/.*({OF_TOWERS}|adapters_of_all)\w*\[(minimax_m3_vl|step3p7)[-\]]": "rotates patches "
    "otherwise",
    r"test_multimodal\.py.*gives_the_references_logits\[minimax_m3_vl\]": "writes a dense MLP as experts",
    r"tests/vision/.*\[aria[-\]]": "has other names in its modules",
    r"test_crops\.py::test_(masks_that_show|squares_of_another)": "has other names in its modules of Aria",
    r"test_processors\.py.*\[(molmo2|ernie4_5_vl_moe|minicpmv4_7)\]": "does not have its processor",
    r"test_processors\.py.*(packed_conversations|repeated_in)\w*\[idefics3\]": "needs torchvision for "
    "its processor",
    r"tests/vision/.*\[minicpmv4_6[-\]]": "has no images of different sizes in one call",
    r"\[hy_v4-defaults\]": "refuses its layer types",
    r"test_(dropout|parity)\.py.*\[gpt_neox_japanese(-as_is)?\]": "fails where only a part of a head rotates",
    r"test_all_vision_language_families_are_registered": "does not have all of them",
    r"test_published_templates\.py.*\[(gptoss|lfm2_2_5)\]": "shows templates no reasoning under another name",
    r"test_beams\w*\[qwen2_5_vl\]": "counts images by the tokens that begin them, which the prompt lacks",
    rf"test_multimodal\.py::test_{READS_A_TEXT_PART}\w*\[{WHISPERS}\]": ANOTHER_ROOT,
    rf"tests/audio/.*test_(the_text_part|files_of_every|positions_in)\w*\[{WHISPERS}\]": ANOTHER_ROOT,
    rf"tests/audio/test_in_transformers\.py.*\[{WHISPERS}[-\]]": ANOTHER_ROOT,
    r"test_granite_speech\.py::test_an_adapter_next_to": ANOTHER_ROOT,
    r"tests/audio/test_(in_transformers|parity)\.py.*\[gemma4[-\]]": "inverts masks of plain attention",
    r"test_phi4_multimodal\.py::test_adapters_of_images": "looks for adapters under another name",
    r"\[axk1-experts by a list\]": "does not read mlp_layer_types",
    r"\[axk2-defaults\]|real_widths\w*\[axk2\]": "refuses the newer name of layer types",
    r"test_(short_clips|modules_have|hidden_states)\w*\[qwen[23]\w*_thinker\]": BESIDE,
}
OF_ADAPTERS = "(adapters_match_transformers_own_model|adapters_of_all_linear_layers)"
OF_TOKENS = "(equal_the_references|another_value_of_any_field)"
BEFORE_5_24 = {
    r"\[bailing_hybrid-latent of queries\]": "has no latents of queries in Ling 3",
    rf"tests/vision/.*({OF_PIXELS}|{OF_TOWERS}|{OF_ADAPTERS}|{OF_TOKENS})\w*\[muse_glimmer[-\]]": "reads the "
    "table of positions along the other axis",
}
SINCE_5_24 = frozenset({"exaone", "lara_mini", "sarvam_mla", "sarvam_moe"})
"""Families that releases before 5.24 lack, and in which they represent no others (representatives.py)."""
LATER_ADAPTERS = (
    r"(transformers_loads_and_saves|own_add_adapter|multimodal\.py::test_adapters_of_images"
    r"|granite_speech\.py::test_an_adapter_next_to)"
)
WITHOUT_IMAGES = "(gives_its_logits|gives_the_references_logits|trains_in_full|may_mix|all_linear_layers)"
LATER = {
    r"test_peers_are_measured_in_each_setting": "has SDPA in GPT-J",
    LATER_ADAPTERS: "asks for a later PEFT than there is",
    rf"{WITHOUT_IMAGES}\w*\[llama4[-\]]": "fails without images",
    r"test_a_(batch_may_mix|variant_matches)\w*\[mistral_large4[-\]]": "trains the scales of rotary "
    "frequencies",
}
ANOTHER_MODEL = {
    r"CohereCompass\w+": "orders the rotary frequencies of the released model otherwise",
    r"Inkling\w+": "has another place for the norm of embeddings",
    r"Glm5Next\w+": "does not have its layer types",
    r"Qwen4Exp\w+": "does not have the layer type indexed_attention",
}


def skip_other_releases(items: Iterable[Any]) -> None:
    """Mark the cases that differ in the installed release."""
    if (release := installed_release()) is None:
        return
    differs = OTHERWISE if release < FOLLOWED else LATER if release > FOLLOWED else {}
    if release < (5, 24):
        differs = differs | BEFORE_5_24
    for item in items:
        for pattern, reason in differs.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=_of_release(reason)))


def class_of_transformers(name: str) -> Any:
    """The class of this name, or skip where the installed release does not have it, or has another model
    under its name.
    """
    found = getattr(pytest.importorskip("transformers"), name, None)
    if found is None:
        pytest.skip(_of_release(f"does not have {name}"))
    for pattern, reason in ANOTHER_MODEL.items():
        if installed_release() < FOLLOWED and re.fullmatch(pattern, name):
            pytest.skip(_of_release(reason))
    return found


def installed_release() -> tuple[int, ...] | None:
    try:
        from transformers import __version__
    except ImportError:
        return None
    return tuple(map(int, re.findall(r"\d+", __version__)[:2]))


def _of_release(reason: str) -> str:
    from transformers import __version__

    return f"transformers {__version__} {reason}"
