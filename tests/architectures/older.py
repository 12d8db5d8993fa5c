"""Cases in which transformers before 5.23 differs from later releases, which the tests follow: patterns of
tests that are skipped there, each with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

FIRST = (5, 23)
QUARTER = "(stablelm|qwen3_next|qwen3_5_text|qwen3_5_moe_text)"
GRANITE = "granitemoe(_swa|shared)?"
READS_CHECKPOINTS = "(a_checkpoint_of_the_reference|the_reference_reads|verify_accepts|configs_spelled)"
OTHERWISE = {
    rf"\[{GRANITE}-output_router_logits=True|router_loss\w*\[{GRANITE}\]": "fails to add the loss of routers",
    rf"test_checkpoints\.py::test_{READS_CHECKPOINTS}\w*\[{QUARTER}\]": "writes the default of "
    "partial_rotary_factor beside the value in rope_parameters, and from_hub refuses contradictions",
    r"\[gemma-hidden_act\]": "has another form of gelu",
    r"\[minimax_m2-rotary_dim\]": "does not read rotary_dim",
    r"embeddings_in_place_of_ids_agree\[gemma4_text\]": "has another signature for inputs per layer",
    r"norms_round_where\w*\[nemotron_h\]": "rounds elsewhere",
    r"\[granitemoehybrid-older_names\]|null_key\w*\[granitemoehybrid\]": "refuses older names of layer types",
    r"(every_key|another_value)\w*\[gpt_oss\]": "has constants for swiglu_alpha and swiglu_limit",
    r"missing_keys_of_a_text_config\w*\[nemotron_h_omni\]": "does not have the family",
    r"\[IQuest-Coder": "does not have the family",
}


def skip_older(items: Iterable[Any]) -> None:
    """Mark the cases that differ in the installed release."""
    try:
        from transformers import __version__
    except ImportError:
        return
    if tuple(map(int, re.findall(r"\d+", __version__)[:2])) >= FIRST:
        return
    for item in items:
        for pattern, reason in OTHERWISE.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=f"transformers {__version__} {reason}"))
