"""The pages that are made from the registry: the README's table of models.

write_pages(repository)    # a checkout's folder
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from liger_models.architectures import find_architecture, list_architectures
from liger_models.architectures.about import About, about

BEGIN = "<!-- made by `liger-models card` -->"
END = "<!-- until here -->"


def write_pages(repository: Path) -> list[Path]:
    """Renew what is generated in a checkout; returns the files that changed."""
    readme = repository / "README.md"
    changed = []
    if readme.is_file() and BEGIN in readme.read_text():
        changed += _write(readme, between_markers(readme.read_text(), models_table()))
    return changed


def models_table() -> str:
    """The README's table of models."""
    rows = []
    for model_type in list_architectures():
        words = about(find_architecture(model_type))
        rows.append([words.name, words.traits, source(words), f"`{model_type}`"])
    rows.sort(key=lambda row: row[0].lower())
    return markdown_table(["family", "in a few words", "from", "model_type"], rows)


def source(words: About) -> str:
    """The papers, linked; who published it, where there are none."""
    links = [f"[{paper}](https://arxiv.org/abs/{paper})" for paper in words.papers]
    return ", ".join(links) or words.source


def between_markers(page: str, text: str) -> str:
    """The page with `text` in the place of what stands between the markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _write(path: Path, text: str) -> list[Path]:
    if path.is_file() and path.read_text() == text:
        return []
    path.write_text(text)
    return [path]
