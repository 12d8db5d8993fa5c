"""TRL's own parts, imported without the packages of its trainers."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

# Imports of TRL other than its losses: for data sets, and for tables of samples.
_ABSENT = {"datasets": ("IterableDataset", "Dataset"), "pandas": ("DataFrame",)}


def trl_module(name: str) -> Any:
    """The module trl.NAME, with stubs for missing packages. Raises ImportError without TRL."""
    for package, names in _ABSENT.items():
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            module = types.ModuleType(package)
            module.__spec__ = importlib.machinery.ModuleSpec(package, None)
            for one in names:
                setattr(module, one, type(one, (), {}))
            sys.modules[package] = module
    return importlib.import_module(f"trl.{name}")
