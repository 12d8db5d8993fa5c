"""Preference pairs that are whole conversations."""

from __future__ import annotations

from typing import Any


def with_common_prompt(fields: dict[str, Any]) -> dict[str, Any]:
    """Split a pair of whole conversations into their common prompt and two answers. A prompt as text next to
    them must be the content of one of their common messages.
    """
    chosen, rejected = fields.get("chosen"), fields.get("rejected")
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        return fields
    alike = [a == b for a, b in zip(chosen, rejected, strict=False)]
    common = min([*alike, False].index(False), len(chosen) - 1, len(rejected) - 1)
    if "prompt" in fields and not any(
        isinstance(message, dict) and message.get("content") == fields["prompt"]
        for message in chosen[:common]
    ):
        return fields
    return {**fields, "prompt": chosen[:common], "chosen": chosen[common:], "rejected": rejected[common:]}
