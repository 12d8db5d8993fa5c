"""Name and origin of a family for display, from the first sentence of its file's docstring, or of its
function's if a file holds several families.

    Granite 3 (IBM, 2024): LLaMA with multipliers of embeddings, scores and branches.
    name      (source)  : traits
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass

from liger_models.architectures.registry.registry import Architecture


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


def about(architecture: Architecture) -> About:
    """Parse the family's docstring.

    Raises:
        ValueError: it does not start with "NAME (SOURCE, YEAR): TRAITS."
    """
    build = architecture.build
    text = " ".join((inspect.getdoc(build) or sys.modules[build.__module__].__doc__ or "").split())
    sentence = re.split(r"\.(?: |$)", text, maxsplit=1)[0]
    title, colon, traits = sentence.partition(": ")
    sources = re.findall(r"\(([^)]*\b\d{4}\b[^)]*)\)", title)
    if not colon or not sources:
        raise ValueError(
            f"the docstring of {build.__module__} begins with {sentence[:80]!r}; "
            "expected 'NAME (SOURCE, YEAR): TRAITS.'"
        )
    source = "; ".join(sources)
    papers = tuple(re.findall(r"\b\d{4}\.\d{4,5}\b", source))
    return About(re.sub(r" ?\([^)]*\b\d{4}\b[^)]*\)", "", title), source, papers, traits)
