"""Families, one file each: specs and checkpoint names. Importing this package registers all of them.

May import the packages in this folder, the specs and the conversion package; it computes nothing.
"""

import importlib
import pkgutil

from liger_models.architectures.registry import (
    Architecture,
    find_architecture,
    list_architectures,
    register,
    with_mtp,
)

__all__ = ["Architecture", "find_architecture", "list_architectures", "register", "with_mtp"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
