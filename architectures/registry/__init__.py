"""Registry of families: `register` adds one, `for_tests` its test configs, `find_architecture` looks it up.

May import convert and the specs; every family's file imports it.
"""

from liger_models.architectures.registry.registry import (
    Architecture,
    find_architecture,
    for_tests,
    list_architectures,
    register,
    with_mtp,
)

__all__ = ["Architecture", "find_architecture", "for_tests", "list_architectures", "register", "with_mtp"]
