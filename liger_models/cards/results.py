"""Results on a card, as data and as text, read without torch: docs/families/FAMILY.json.

card = read_card("llama", checkout)
against_peers(card)    # "1.27 x the speed, 0.83 x the memory"
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CARDS = Path("docs/families")
OURS, PEERS = "ours", ("transformers+liger", "transformers")

# For results from before each provider had its own process.
SHARED = "†"
SHARED_NOTE = (
    f"{SHARED} Measured when all providers shared one process, in which peers ran after ours. That made "
    "torch choose a slower attention kernel for them: their steps took up to 6% too long."
)


@dataclass(frozen=True)
class Line:
    """Result of one check.

    Attributes:
        check: its name in `CHECKS`.
        passed: None if it has never been run.
        values: measured values; or `error` if it crashed, or `not_run`, its missing requirement.
        command: reproduces the line.
        date: ISO 8601, UTC.
        machine, versions: hardware and library versions.
    """

    check: str
    passed: bool | None
    values: Mapping[str, Any]
    command: str
    date: str
    machine: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Card:
    family: str
    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed; checks that were not run count as passed."""
        return all(line.passed is not False for line in self.lines)

    @staticmethod
    def read(path: Path) -> Card:
        raw = json.loads(path.read_text())
        return Card(raw["family"], tuple(Line(**line) for line in raw["lines"]))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join("    " + json.dumps(asdict(line)) for line in self.lines)
        path.write_text(f'{{\n  "family": {json.dumps(self.family)},\n  "lines": [\n{lines}\n  ]\n}}\n')


def card_path(model_type: str, repository: Path) -> Path:
    """Path of a family's card data."""
    return repository / CARDS / f"{model_type}.json"


def read_card(model_type: str, repository: Path) -> Card | None:
    path = card_path(model_type, repository)
    return Card.read(path) if path.is_file() else None


def against_peers(card: Card | None) -> str:
    """Speed and memory of our training step relative to the fastest peer; empty if not measured."""
    step = card.lines[-1] if card is not None else None
    return format_against_peers(step.values) if step is not None and step.passed else ""


def fastest(found: Mapping[str, Any], *peers: str) -> tuple[str, Mapping[str, Any]] | None:
    """The fastest setting among these peers (`transformers` is without liger-kernel), with its result."""
    ran = [
        (name, result)
        for name, result in found["providers"].items()
        if "tokens_per_second" in result and _peer_of(name) in peers
    ]
    return max(ran, key=lambda item: item[1]["tokens_per_second"], default=None)


def ratios(found: Mapping[str, Any]) -> tuple[float, float | None] | None:
    """Our speed and memory relative to the fastest peer's; None where unknown."""
    peer = fastest(found, *PEERS)
    _, ours = _fastest_of_ours(found)
    if peer is None or "tokens_per_second" not in ours:
        return None
    _, best = peer
    memory = ours["gib"] / best["gib"] if ours["gib"] and best["gib"] else None
    return ours["tokens_per_second"] / best["tokens_per_second"], memory


def format_against_peers(found: Mapping[str, Any]) -> str:
    """'1.27 x the speed, 0.83 x the memory', marked if peers shared a process with ours."""
    both = ratios(found)
    if both is None:
        return "no peer ran"
    speed, memory = both
    said = f"{speed:.2f} x the speed" + (f", {memory:.2f} x the memory" if memory is not None else "")
    return said if found.get("own_processes") else f"{said}{SHARED}"


def say(found: Mapping[str, Any]) -> str:
    shape = f"{found['model']}, {found['layers']} layers, {found['batch']} x {found['tokens']} tokens"
    shape += " with images" if found.get("data") == "images" else ""
    best_of_ours, _ = _fastest_of_ours(found)
    own = sorted((name for name in found["providers"] if _peer_of(name) == OURS), key=best_of_ours.__ne__)
    parts = [f"{_setting(name)}: {_say_result(found['providers'][name])}" for name in own]
    for peer in PEERS:
        settings = {name: result for name, result in found["providers"].items() if _peer_of(name) == peer}
        best = fastest(found, peer)
        if best is not None:
            parts.append(f"{_setting(best[0])}: {_say_result(best[1])}")
            del settings[best[0]]
        notes = {_setting(name): _say_result(result) for name, result in settings.items()}
        if len(set(notes.values())) == 1 and best is None:
            parts.append(f"{peer}: {next(iter(notes.values()))}")
        else:
            parts += [f"{name}: {note}" for name, note in notes.items()]
    speeds = format_against_peers(found) + (" of the fastest peer" if ratios(found) else "")
    return f"{shape}, bfloat16, fused AdamW: {speeds}. {'; '.join(parts)}"


def _fastest_of_ours(found: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Our fastest setting with its result, or the first if none ran."""
    own = {name: result for name, result in found["providers"].items() if _peer_of(name) == OURS}
    return max(own.items(), key=lambda item: item[1].get("tokens_per_second", 0.0))


def _peer_of(provider: str) -> str:
    if OURS in provider.split("+"):
        return OURS
    return PEERS[0] if "liger" in provider.split("+") else PEERS[1]


def _setting(provider: str) -> str:
    """'transformers+liger (sdpa, grouped_mm)', or a name without settings."""
    peer = _peer_of(provider)
    if provider == peer:
        return peer
    return f"{peer} ({', '.join(provider.removeprefix(peer).strip('+').split('+'))})"


def _say_result(result: Mapping[str, Any]) -> str:
    if "note" in result:
        return result["note"]
    memory = "" if result["gib"] is None else f", {result['gib']:.1f} GiB"
    return f"{result['tokens_per_second']:,.0f} tokens/s{memory}"
