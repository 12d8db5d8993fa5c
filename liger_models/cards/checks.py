"""The checks of a card: each runs on the artefacts of a `Workshop` and returns its result.

A check returns whether it passed and its measurements as data, which `say` formats. If it cannot run on this
machine it raises `NotRun`. The measurements include the `command` that produces them, unless that is
`liger-models card` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from liger_models.cards.results import say
from liger_models.cards.workshop import STEPS, Workshop
from liger_models.layers.audio.sounds import KEYWORDS
from liger_models.layers.vision.grid_inputs import PIXELS
from liger_models.models.verification import (
    TOLERANCE,
    mask_as_family,
    relative_distance,
    verify_bytes,
    verify_numbers,
)

Values = Mapping[str, Any]
TRAINING_STEP = "training_step"
PROMPTS, PROMPT_LENGTH, NEW_TOKENS = 3, 9, 24


@dataclass(frozen=True)
class Check:
    """One line of a card.

    Attributes:
        title: the subject of the check.
        run: runs the check; None for the training step, which `training_step.measure` runs for all families
            at once.
        say: formats the result.
    """

    title: str
    run: Callable[[Workshop], tuple[bool, Values]] | None
    say: Callable[[Values], str]


def round_trip(shop: Workshop) -> tuple[bool, Values]:
    changed: list[str] = []
    tensors = files = 0
    for layout in shop.architecture.layouts:
        folder = shop.in_layout(layout)
        trip = verify_bytes(folder)
        out = shop.folder / f"back-{folder.name}"
        shop.load(folder).save_pretrained(out)
        before, after = _files(folder), _files(out)
        changed += trip.changed
        changed += sorted(name for name in before.keys() | after if before.get(name) != after.get(name))
        tensors += trip.tensors
        files += len(before)
    layouts = len(shop.architecture.layouts)
    return not changed, {"layouts": layouts, "tensors": tensors, "files": files, "changed": changed}


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _say_round_trip(found: Values) -> str:
    if found["changed"]:
        return f"changed: {', '.join(found['changed'])}"
    return (
        f"{found['tensors']} tensors in {found['files']} files, {_count(found['layouts'], 'layout')}: "
        "every byte the same"
    )


def numbers(shop: Workshop) -> tuple[bool, Values]:
    found = verify_numbers(shop.checkpoint)
    worst = found.gradients[0]
    values = {
        "images": found.images,
        **({"sounds": found.sounds} if found.sounds else {}),
        "logits": found.distance["logits"],
        "loss": found.distance["loss"],
        "gradients": len(found.gradients),
        "worst_gradient": worst,
        "worst": found.distance[worst],
        "worst_of_theirs": found.spread[worst],
        "too_far": found.too_far,
        "not_compared": list(found.lonely),
    }
    return not (found.too_far or found.lonely), values


def _say_numbers(found: Values) -> str:
    counts = {"image": found.get("images"), "audio clip": found.get("sounds")}
    media = [f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.items() if n]
    text = f"with {' and '.join(media)}: " if media else ""
    text += (
        f"relative distance of logits {found['logits']:.1e}, loss {found['loss']:.1e}, at most "
        f"{found['worst']:.1e} of {found['gradients']} gradients (`{found['worst_gradient']}`; "
        f"transformers' own spread there: {found['worst_of_theirs']:.1e})"
    )
    text += f"; too far: {', '.join(found['too_far'])}" if found["too_far"] else ""
    return text + (f"; not compared: {', '.join(found['not_compared'])}" if found["not_compared"] else "")


def generation(shop: Workshop) -> tuple[bool, Values]:
    model = shop.load(shop.checkpoint)
    prompt = shop.prompt(PROMPTS, PROMPT_LENGTH)
    ids = prompt["input_ids"]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = shop.reference.generate(**{"attention_mask": torch.ones_like(ids), **prompt}, **options)
    found = model.generate(**prompt, max_new_tokens=NEW_TOKENS, eos_token_id=())
    if found.shape != expected.shape:
        return False, {"tokens": PROMPTS * NEW_TOKENS, "same": 0}
    # No processor produces the token after a placeholder without its image or sound.
    made = expected[:, ids.shape[1] :]
    named = torch.isin(made, torch.tensor([*shop.spec.placeholders.values()], dtype=made.dtype))
    counts = named.cumsum(1) - named.int() == 0
    same = ((found == expected)[:, ids.shape[1] :] & counts).sum().item()
    tokens = counts.sum().item()
    values = {"tokens": tokens, "same": same, "images": bool({"pixel_values", PIXELS} & prompt.keys())}
    return same == tokens, values | ({"sounds": True} if prompt.keys() & set(KEYWORDS) else {})


def resume(shop: Workshop) -> tuple[bool, Values]:
    whole, resumed = shop.trained, shop.resumed
    losses, again = ([record["loss"] for record in run.records[-STEPS // 2 :]] for run in (whole, resumed))
    same = _files_of_weights(whole.final) == _files_of_weights(resumed.final) and losses == again
    values = {"steps": STEPS, "from": STEPS // 2, "same": same}
    return same, {**values, "first_loss": whole.records[0]["loss"], "last_loss": losses[-1]}


def _say_resume(found: Values) -> str:
    bits = "bitwise equal weights and losses" if found["same"] else "different weights or losses"
    return (
        f"{found['steps']} steps, and resumed from the checkpoint of step {found['from']}: {bits} "
        f"(loss {found['first_loss']:.3f} to {found['last_loss']:.3f})"
    )


def _files_of_weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def reload(shop: Workshop) -> tuple[bool, Values]:
    folder = shop.trained.final
    prompt = shop.prompt(2, 19)
    reference = shop.reference_class.from_pretrained(folder, attn_implementation="eager")
    mask_as_family(shop.architecture, reference)
    with torch.no_grad():
        expected = reference(**prompt, use_cache=False).logits
        distance = relative_distance(shop.load(folder)(**prompt).logits, expected)
    return distance <= TOLERANCE, {"logits": distance}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


CHECKS: Mapping[str, Check] = {
    "round_trip": Check("round trip of a checkpoint", round_trip, _say_round_trip),
    "numbers": Check("logits, loss and gradients against transformers, float32", numbers, _say_numbers),
    "generation": Check(
        "greedy generation against transformers",
        generation,
        lambda found: (
            f"{found['same']} of {found['tokens']} tokens the same"
            + (", after images" if found.get("images") else "")
            + (", after audio" if found.get("sounds") else "")
        ),
    ),
    "resume": Check("resuming a training run", resume, _say_resume),
    "reload": Check(
        "trained checkpoint loaded in transformers",
        reload,
        lambda found: f"relative distance of logits {found['logits']:.1e}",
    ),
    TRAINING_STEP: Check("a training step on a GPU", None, say),
}
