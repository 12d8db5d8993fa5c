"""What a family is called and where it comes from, for people: read off the first sentence that its file, or
the docstring of its own function where a file holds several families, begins with.

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
    """A family in words.

    Attributes:
        name: its models' names, "Granite 3".
        source: who published it and when, "IBM, 2024"; of several, all.
        papers: numbers of its papers on arXiv, which `source` then names too.
        traits: in what it differs from others.
    """

    name: str
    source: str
    papers: tuple[str, ...]
    traits: str


def about(architecture: Architecture) -> About:
    """What the family's docstring says.

    Raises:
        ValueError: it does not begin with "NAME (SOURCE, YEAR): TRAITS."
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
