"""The registry of families: `register` adds one, `for_tests` gives it the configs of its tests, and
`find_architecture` returns the one that a config names.

May import convert and the specs; every family's file imports it.
"""

from liger_models.architectures.registry.registry import (
    Architecture,
    find_architecture,
    for_tests,
    list_architectures,
    register,
)

__all__ = ["Architecture", "find_architecture", "for_tests", "list_architectures", "register"]
