"""Makes registration in transformers cheap for tests, which register and unregister in nearly every test."""

import sys
from collections.abc import Callable
from typing import Any


def search_after_imports_only() -> None:
    """Let `liger_models.hf.register` and `unregister` search for copies of the module `transformers` only
    after modules were imported: the search through all modules takes most of their time.
    """
    from liger_models.hf import families

    if families._all_transformers.__name__ == "found_earlier":
        return
    search: Callable[[], list[Any]] = families._all_transformers
    found: dict[tuple[int, int], list[Any]] = {}

    def found_earlier() -> list[Any]:
        now = len(sys.modules), id(sys.modules["transformers"])
        if now not in found:
            found.clear()
            found[now] = search()
        return found[now]

    families._all_transformers = found_earlier
