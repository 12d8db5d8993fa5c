"""The registry of families: `register` adds one, `for_tests` adds its test configs, and `find_architecture`
looks up the family of a config.

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
