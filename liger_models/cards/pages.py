"""Pages generated from the registry and the cards: docs/families/FAMILY.md, each from the data next to it,
and docs/families/README.md, an overview of all families.

    write_pages(repository)    # a checkout's folder

A family's picture, next to its page, takes a moment and changes seldom: `write_pages` draws those asked for,
and those that are missing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path

from liger_models.architectures import Architecture, find_architecture, list_architectures
from liger_models.cards.checks import CHECKS
from liger_models.cards.pictures import picture_of_family
from liger_models.cards.published import features_of_family, published
from liger_models.cards.results import (
    CARDS,
    SHARED,
    SHARED_NOTE,
    Card,
    Line,
    against_peers,
    card_path,
    read_card,
)
from liger_models.families import About, about
from liger_models.presets import PRESETS

MADE = "<!-- made by `liger-models card` -->\n"


def write_pages(repository: Path, pictures: Collection[str] | None = None) -> list[Path]:
    """Regenerate all pages made from the registry and the cards; returns the files that changed.

    pictures: families to draw, in addition to those without a picture; None for all.
    """
    pages = make_pages(repository)
    for path in [path for path in pages if path.name != "README.md"]:
        drawn = path.with_suffix(".svg")
        if pictures is None or path.stem in pictures or not drawn.is_file():
            pages[drawn] = picture_of_family(find_architecture(path.stem), repository)
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages[path])
    return stale


def make_pages(repository: Path) -> dict[Path, str]:
    """Text of every generated page, by path."""
    families = [*_by_name(list_architectures()), *_by_name(list_architectures(vision=True, audio=True))]
    pages = {repository / CARDS / "README.md": overview(families, repository)}
    for family in families:
        if card := read_card(family.model_type, repository):
            pages[card_path(family.model_type, repository).with_suffix(".md")] = card_page(
                family, card, repository
            )
    return pages


def _by_name(model_types: Sequence[str]) -> list[Architecture]:
    names = sorted(model_types, key=lambda model_type: about(model_type).name.lower())
    return [*map(find_architecture, names)]


def overview(families: Sequence[Architecture], repository: Path) -> str:
    """Overview of all families: what each is, then its sizes, features and checks."""
    words, rows = [], []
    for family in families:
        described, card = about(family.model_type), read_card(family.model_type, repository)
        name = _linked(described.name, family, repository)
        words.append([name, described.traits, source(described), f"`{family.model_type}`"])
        shown = sizes(family, repository), ", ".join(features_of_family(family, repository))
        rows.append([name, *shown, str(len(family.layouts)), *_state(card)])
    header = ["family", "in a few words", "from", "model_type"]
    language = [row for row, family in zip(words, families, strict=True) if not family.multimodal]
    vision = [row for row, family in zip(words, families, strict=True) if family.multimodal]
    checks = markdown_table(
        ["family", "known sizes", "features", "layouts", "checked", "training step"], rows
    )
    note = [SHARED_NOTE] if SHARED in checks else []
    return MADE + "\n\n".join(
        [
            "# Families",
            OPENING,
            "## Language models",
            markdown_table(header, language),
            "## Multimodal families",
            markdown_table(header, vision),
            "## Sizes, features and checks",
            CHECKS_OPENING,
            *note,
            f"{checks}\n",
        ]
    )


OPENING = """\
The page of a family says what was compared with transformers, when and where, and how large the
differences were.

All types of rotary embedding in the configs of these families are supported (`default`, `linear`,
`dynamic`, `yarn`, `longrope`, `llama3`, `proportional`), in the old spelling and the new one. A config with
an unknown key is refused by name, never guessed at. Only safetensors files are read; nothing is unpickled,
and no code from a repository runs."""

CHECKS_OPENING = """\
Generated from the registry, the published configs and the results of `liger-models card FAMILY`. Layouts
are the formats of a family's checkpoints; not every size has all features listed. Training steps are
measured for the smallest known size, with as many of its layers (and experts) as its page says, relative to
the faster of transformers and transformers with liger-kernel, each in its fastest setting; "not run" where
that was not measured."""


def card_page(family: Architecture, card: Card, repository: Path) -> str:
    """A card as a page."""
    words = about(family.model_type)
    presets = [f"`{name}`" for name, config in PRESETS.items() if config["model_type"] == family.model_type]
    facts = [
        f"{words.traits[0].upper()}{words.traits[1:]}.",
        "",
        f"- from: {source(words)}",
        f"- in config.json: `{family.model_type}`; in transformers: `{family.reference}`",
        f"- known sizes: {sizes(family, repository) or 'none'}",
        f"- features: {', '.join(features_of_family(family, repository))}",
        *([f"- presets: {', '.join(presets)}"] if presets else []),
    ]
    shown = f"![The layers of {words.name}, and what they keep in memory]({family.model_type}.svg)"
    parts = [f"{MADE}# {words.name}", "\n".join(facts), shown]
    ran = [line for line in card.lines if line.passed is not None]
    for (date, where), lines in groupby(ran, key=lambda line: (line.date, _where(line))):
        rows = [
            [CHECKS[line.check].title, _verdict(line), _found(line), f"`{line.command}`"] for line in lines
        ]
        table = markdown_table(["", "", "found", "made by"], rows)
        parts.append(f"On {date}, {where}:\n\n{table}")
    if any(SHARED in part for part in parts):
        parts.append(SHARED_NOTE)
    left = [
        f"- {CHECKS[line.check].title}: not run ({line.values['not_run']})"
        for line in card.lines
        if line.passed is None
    ]
    return "\n\n".join([*parts, *(["\n".join(left)] if left else [])]) + "\n"


def sizes(family: Architecture, repository: Path) -> str:
    """Known models with their parameters in billions."""
    return ", ".join(
        f"{model.name} ({model.parameters / 1e9:.3g} B)" for model in published(family, repository)
    )


def source(words: About) -> str:
    """Links to the papers; the publisher if there are none."""
    links = [f"[{paper}](https://arxiv.org/abs/{paper})" for paper in words.papers]
    return ", ".join(links) or words.source


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _linked(text: str, family: Architecture, repository: Path) -> str:
    card = card_path(family.model_type, repository)
    return f"[{text}]({card.with_suffix('.md').name})" if card.is_file() else text


def _state(card: Card | None) -> tuple[str, str]:
    """A card's status: the checks that any machine can run, and the training step."""
    if card is None:
        return "not yet", "not run"
    *others, step = card.lines
    ran = [line for line in others if line.passed is not None]
    passed = sum(bool(line.passed) for line in ran)
    dates = sorted({line.date for line in ran})
    checked = f"{passed} of {len(others)} passed, {dates[0]}" if ran else "not run"
    return checked, against_peers(card) or _verdict(step)


def _verdict(line: Line) -> str:
    return {True: "passed", False: "**failed**", None: "not run"}[line.passed]


def _found(line: Line) -> str:
    return line.values["error"] if "error" in line.values else CHECKS[line.check].say(line.values)


def _where(line: Line) -> str:
    versions = [f"{package} {version}" for package, version in line.versions.items()]
    return ", ".join([line.machine, *versions])
