"""Pages generated from the registry and the cards: docs/families/FAMILY.md, each from the data next to it;
docs/families/README.md, an overview of all families; and the README's table of models.

    write_pages(repository)    # a checkout's folder
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from liger_models.architectures import Architecture, find_architecture, list_architectures
from liger_models.cards.checks import CHECKS
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

BEGIN = "<!-- made by `liger-models card` -->"
END = "<!-- until here -->"
MADE = f"{BEGIN}\n"


def write_pages(repository: Path) -> list[Path]:
    """Regenerate all pages made from the registry and the cards; returns the files that changed."""
    pages = make_pages(repository)
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages[path])
    return stale


def make_pages(repository: Path) -> dict[Path, str]:
    """Text of every generated page, by path."""
    families = [*_by_name(list_architectures()), *_by_name(list_architectures(vision=True))]
    pages = {repository / CARDS / "README.md": overview(families, repository)}
    for family in families:
        if card := read_card(family.model_type, repository):
            pages[card_path(family.model_type, repository).with_suffix(".md")] = card_page(
                family, card, repository
            )
    readme = repository / "README.md"
    if readme.is_file() and BEGIN in readme.read_text():
        pages[readme] = between_markers(readme.read_text(), models_table(families, repository))
    return pages


def _by_name(model_types: Sequence[str]) -> list[Architecture]:
    names = sorted(model_types, key=lambda model_type: about(model_type).name.lower())
    return [*map(find_architecture, names)]


def models_table(families: Sequence[Architecture], repository: Path) -> str:
    """The README's tables of language models and of vision-language models."""

    def table(first: str, vision: bool) -> str:
        rows = []
        for family in families:
            if family.vision == vision:
                words = about(family.model_type)
                name = _linked(f"`{family.model_type}`", family, repository, str(CARDS) + "/")
                step = against_peers(read_card(family.model_type, repository))
                rows.append([words.name, words.traits, source(words), name, step])
        return markdown_table([first, "in a few words", "from", "model_type", "a training step"], rows)

    tables = f"{table('family', False)}\n\n{table('multimodal family', True)}"
    return f"{SHARED_NOTE}\n\n{tables}" if SHARED in tables else tables


def overview(families: Sequence[Architecture], repository: Path) -> str:
    """Overview of all families."""
    rows = []
    for family in families:
        rows.append(
            [
                _linked(about(family.model_type).name, family, repository),
                sizes(family, repository),
                ", ".join(features_of_family(family, repository)),
                str(len(family.layouts)),
                *_state(read_card(family.model_type, repository)),
            ]
        )
    header = ["family", "known sizes", "features", "layouts", "checked", "training step"]
    table = markdown_table(header, rows)
    note = f"{SHARED_NOTE}\n\n" if SHARED in table else ""
    return (
        f"{MADE}# Families\n\n"
        "Generated from the registry, the published configs and the cards. A card records the checks of a\n"
        "family against its reference in transformers, run by `liger-models card FAMILY`. Layouts are the\n"
        "formats of its checkpoints; not every size has all features listed. Training steps are\n"
        "measured for the smallest known size, with as many layers as fit on one GPU, relative to the\n"
        "faster of transformers and transformers with liger-kernel, each in its fastest setting.\n\n"
        f"{note}"
        f"{table}\n"
    )


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
    parts = [f"{MADE}# {words.name}", "\n".join(facts)]
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


def between_markers(page: str, text: str) -> str:
    """The page with the text between the markers replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _linked(text: str, family: Architecture, repository: Path, folder: str = "") -> str:
    card = card_path(family.model_type, repository)
    return f"[{text}]({folder}{card.with_suffix('.md').name})" if card.is_file() else text


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
