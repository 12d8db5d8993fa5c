"""Compile every kernel for a Hopper GPU on a machine without one, and look for integers of 32 bits that
overflow on their way to an address, at sizes that fill the largest GPUs; test_compilation.py runs this.

Operations run on tensors of the meta device, which have shapes and no data. Launches are compiled up to
Triton's IR, in which index_ranges.py follows the integers from the grid and the arguments to the addresses.
The grid is checked as well. Of each kernel the largest launch is looked at; with `--all` that of each
specialisation.
"""

import math
import sys
from typing import Any, NamedTuple

from benchmarks.compiled.gpus import imitate

LARGEST_GRID = (2**31 - 1, 65535, 65535)


class Launch(NamedTuple):
    case: str
    tokens: int
    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    integers: dict[str, int]

    @property
    def size(self) -> int:
        """Larger for larger operands."""
        return math.prod(self.grid) * math.prod(max(abs(x), 1) for x in self.integers.values())


def main() -> None:
    imitate("sm_90")
    import triton
    from compile_kernels import NoDevice, kernels_of, modules_of_kernels, without_code
    from large_cases import CASES, cases, tokens_of
    from triton.runtime.jit import JITFunction

    triton.knobs.runtime.add_stages_inspection_hook = without_code("ttir")
    triton.runtime.driver.set_active(NoDevice())
    run = JITFunction.run
    launches: dict[Any, Launch] = {}

    def note(self: JITFunction, *args: Any, grid: Any, **options: Any) -> None:
        assert "enable_fp_fusion" in options, f"{self} leaves the fusion of products and sums to Triton"
        values = dict(zip((n for n in self.arg_names if n not in options), args, strict=True)) | options
        integers = {name: int(value) for name, value in values.items() if isinstance(value, int)}
        x, y, z = (*(grid(values) if callable(grid) else grid), 1, 1)[:3]
        launch = Launch(case, cases.TOKENS, self, (x, y, z), args, options, integers)
        constants = sorted((name, str(value)) for name, value in options.items() if name.isupper())
        key = (self, *constants) if "--all" in sys.argv else self
        launches[key] = max(launches.get(key, launch), launch, key=lambda launch: launch.size)

    JITFunction.run = note  # type: ignore[method-assign]
    for case, operation in CASES.items():
        cases.TOKENS = tokens_of(case)
        operation()
    launched = {launch.kernel for launch in launches.values()}
    kernels = kernels_of(modules_of_kernels())
    missed = {name for name, kernel in kernels.items() if kernel not in launched}
    assert not missed, f"no case launches {sorted(missed)}"
    faults = [f"{fault} ({launch.case})" for launch in launches.values() for fault in faults_of(launch, run)]
    assert not faults, "\n".join(sorted(set(faults)))
    print(f"looked at {len(launches)} launches")


def faults_of(launch: Launch, run: Any) -> list[str]:
    """What overflows in a launch."""
    from index_ranges import Ranges

    options = {**launch.options, "grid": launch.grid, "warmup": True}
    compiled = run(launch.kernel, *launch.arguments, **options)
    found = Ranges(compiled.asm["ttir"], launch.grid, launch.integers, launch.tokens).faults
    if any(size > most for size, most in zip(launch.grid, LARGEST_GRID, strict=True)):
        found.append(f"a grid of {launch.grid}")
    name = f"{launch.kernel.fn.__module__}.{launch.kernel.fn.__name__}".removeprefix("liger_models.kernels.")
    return [f"{name}: {fault}" for fault in found]


if __name__ == "__main__":
    main()
