"""Run the operations that `python -m benchmarks devices` compiles, and fail if they leave a kernel out;
test_compilation.py runs this. Nothing is compiled.
"""

from typing import Any

from benchmarks.compiled.gpus import imitate


def main() -> None:
    imitate("sm_90")
    from compile_kernels import kernels_of, modules_of_kernels
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from benchmarks.compiled.cases import CASES
    from benchmarks.compiled.launches import NoDevice

    launched: set[str] = set()

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        launched.add(f"{self.fn.__module__}.{self.fn.__name__}")

    driver.set_active(NoDevice("sm_90"))
    found = kernels_of(modules_of_kernels())
    JITFunction.run = note
    for run in CASES.values():
        run()
    missed = sorted(found.keys() - launched)
    assert not missed, f"no operation of benchmarks/compiled/cases.py launches {missed}"
    print(f"{len(CASES)} operations launch {len(found)} kernels")


if __name__ == "__main__":
    main()
