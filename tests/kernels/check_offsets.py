"""Compile every kernel for a Hopper GPU on a machine without one, and look for integers of 32 bits that
overflow on their way to an address, at sizes that fill the largest GPUs; test_compilation.py runs this.

Operations run on tensors of the meta device, which have shapes and no data. Every launch is compiled up to
Triton's IR, in which index_ranges.py follows the integers from the grid and the arguments to the addresses.
The grid is checked as well. With `--all` every specialisation is looked at; without, one of each kernel.
"""

import sys
from typing import Any

from benchmarks.compiled.gpus import imitate

LARGEST_GRID = (2**31 - 1, 65535, 65535)


def main() -> None:
    imitate("sm_90")
    import triton
    from compile_kernels import NoDevice, kernels_of, modules_of_kernels, without_code
    from index_ranges import Ranges
    from large_cases import CASES, cases, tokens_of
    from triton.runtime.jit import JITFunction

    triton.knobs.runtime.add_stages_inspection_hook = without_code("ttir")
    triton.runtime.driver.set_active(NoDevice())
    launch = JITFunction.run
    faults: dict[str, str] = {}
    seen: set[Any] = set()
    launched: set[JITFunction] = set()

    def look(self: JITFunction, *args: Any, grid: Any, **options: Any) -> None:
        name = f"{self.fn.__module__}.{self.fn.__name__}".removeprefix("liger_models.kernels.")
        assert "enable_fp_fusion" in options, f"{name} leaves the fusion of products and sums to Triton"
        values = dict(zip((n for n in self.arg_names if n not in options), args, strict=True)) | options
        constants = sorted((key, str(value)) for key, value in options.items() if key.isupper())
        key = (self, *constants) if "--all" in sys.argv else self
        launched.add(self)
        if key in seen:
            return
        seen.add(key)
        x, y, z = (*(grid(values) if callable(grid) else grid), 1, 1)[:3]
        if any(size > most for size, most in zip((x, y, z), LARGEST_GRID, strict=True)):
            faults.setdefault(f"{name}: a grid of {x, y, z}", case)
        compiled = launch(self, *args, grid=grid, **{**options, "warmup": True})
        integers = {key: int(value) for key, value in values.items() if isinstance(value, int)}
        for fault in Ranges(compiled.asm["ttir"], (x, y, z), integers, cases.TOKENS).faults:
            faults.setdefault(f"{name}: {fault}", case)

    JITFunction.run = look  # type: ignore[method-assign]
    for case, run in CASES.items():
        cases.TOKENS = tokens_of(case)
        run()
    missed = {name for name, kernel in kernels_of(modules_of_kernels()).items() if kernel not in launched}
    assert not missed, f"no case launches {sorted(missed)}"
    assert not faults, "\n".join(f"{fault} ({case})" for fault, case in faults.items())
    print(f"looked at {len(seen)} launches")


if __name__ == "__main__":
    main()
