"""Families and their descriptions, read from the sources in `architectures` without importing torch.

    for family in list_families():
        family.model_type, family.about.name

A family is a function with `@register("NAME", reference="CLASS")`. The first sentence of its docstring, or of
its file's, describes it:

    Granite 3 (IBM, 2024): LLaMA with multipliers of embeddings, scores and branches.
    name      (source)  : traits
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class About:
    """A family's description.

    Attributes:
        name: its models' names, "Granite 3".
        source: publisher and year, "IBM, 2024"; all of them if there are several.
        papers: arXiv numbers of its papers, which `source` then lists, too.
        traits: differences from other families.
    """

    name: str
    source: str
    papers: tuple[str, ...]
    traits: str


@dataclass(frozen=True)
class Family:
    """A registered family.

    Attributes:
        model_type: the name in config.json.
        reference: the class of the reference implementation in transformers.
        vision, audio: whether its models accept images, and whether they accept sounds.
        about: its description.
    """

    model_type: str
    reference: str
    vision: bool
    audio: bool
    about: About


@cache
def list_families() -> tuple[Family, ...]:
    """All families, in order of name.

    Raises:
        ValueError: a docstring does not start with "NAME (SOURCE, YEAR): TRAITS."
    """
    package = importlib.util.find_spec("liger_models.architectures")
    assert package is not None
    assert package.origin is not None
    files = Path(package.origin).parent.glob("*.py")
    found = [family for path in files for family in _families_of(path)]
    return tuple(sorted(found, key=lambda family: family.model_type))


def about(model_type: str) -> About:
    """Description of a family.

    Raises:
        KeyError: an unknown family.
    """
    return {family.model_type: family.about for family in list_families()}[model_type]


def parse_about(docstring: str, where: str) -> About:
    """Parse a family's docstring.

    Raises:
        ValueError: it does not start with "NAME (SOURCE, YEAR): TRAITS."
    """
    sentence = re.split(r"\.(?: |$)", " ".join(docstring.split()), maxsplit=1)[0]
    title, colon, traits = sentence.partition(": ")
    sources = re.findall(r"\(([^)]*\b\d{4}\b[^)]*)\)", title)
    if not colon or not sources:
        raise ValueError(
            f"the docstring of {where} begins with {sentence[:80]!r}; expected 'NAME (SOURCE, YEAR): TRAITS.'"
        )
    source = "; ".join(sources)
    papers = tuple(re.findall(r"\b\d{4}\.\d{4,5}\b", source))
    return About(re.sub(r" ?\([^)]*\b\d{4}\b[^)]*\)", "", title), source, papers, traits)


def _families_of(path: Path) -> list[Family]:
    # The rest serves only tests, and registers nothing.
    source = path.read_text(encoding="utf-8").partition("\n# -- tests\n")[0]
    file = ast.parse(source)
    found = []
    for function in (node for node in file.body if isinstance(node, ast.FunctionDef)):
        for call in function.decorator_list:
            if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "register"):
                continue
            options = {word.arg: word.value for word in call.keywords}
            name, reference = ast.literal_eval(call.args[0]), ast.literal_eval(options["reference"])
            vision, audio = (
                kind in options and ast.literal_eval(options[kind]) for kind in ("vision", "audio")
            )
            text = ast.get_docstring(function) or ast.get_docstring(file) or ""
            found.append(Family(name, reference, vision, audio, parse_about(text, str(path))))
    return found
