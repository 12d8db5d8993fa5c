"""The benchmarked operations, grouped by file."""

from benchmarks.operations import attention, distillation, experts, gated, losses, norms, recurrent, rotary
from benchmarks.operations import core as _core
from benchmarks.operations.core import CPU_PROVIDERS, Case, Operation, Provider, Unavailable

_FILES = (norms, rotary, gated, losses, experts, attention, recurrent, distillation)  # in the tables' order

REGISTRY: dict[str, Operation] = {
    name: operation
    for file in _FILES
    for name, operation in _core.REGISTRY.items()
    if file.__name__.endswith(f".{operation.group}")
}

__all__ = ["CPU_PROVIDERS", "REGISTRY", "Case", "Operation", "Provider", "Unavailable"]
