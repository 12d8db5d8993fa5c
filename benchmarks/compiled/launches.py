"""Launches, compiled and measured instead of run.

A process of its own for each GPU, since `imitate` changes it:

    python -m benchmarks.compiled.launches TARGET JOURNAL [WORD ...]

writes a line of JSON for each launch that differs from the earlier ones, and for each operation that raises.
Compilations are cached by Triton, by the source of a kernel, Triton's version and the GPU; what is measured
is cached next to the journal.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compiled.gpus import TARGETS, imitate


class NoDevice:
    """The part of a Triton driver that compilation needs."""

    def __init__(self, name: str):
        from triton.backends.compiler import GPUTarget

        amd = name.startswith("gfx")
        architecture: Any = name if amd else int(name.removeprefix("sm_"))
        self.target = GPUTarget("hip" if amd else "cuda", architecture, TARGETS[name].warp_size)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0


def compile_instead(name: str, take: Callable[[Any, dict[str, Any], Any], None]) -> None:
    """From now on, compile every launch for the GPU `name` instead of running it.

    `take` gets the kernel, the launch's keyword arguments, and the compiled kernel or the error.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(NoDevice(name))
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            compiled = launch(self, *args, **{**kwargs, "warmup": True})
        except Exception as error:
            compiled = error
        take(self, kwargs, compiled)

    JITFunction.run = compile_only


def measure(compiled: Any, early: bool) -> dict[str, Any]:
    """Registers and spilled bytes of a thread, shared memory, threads, and faults of the code."""
    metadata, text = compiled.metadata, compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    target = metadata.target
    found = {
        "shared": metadata.shared,
        "threads": metadata.num_warps * target.warp_size,
        "tensor_memory": getattr(metadata, "tmem_size", None) or 0,
        "starts_too_early": early and not waits_first(text),
        # 16-bit products that became plain multiplications.
        "plain_products": bool(re.search(r"tt\.dot .*tensor<[^>]*xb?f16", compiled.asm["ttir"]))
        and not re.search(_MATRIX_UNITS, text),
    }
    return found | (_of_cubin(compiled.asm["cubin"]) if target.backend == "cuda" else _of_isa(text))


_MATRIX_UNITS = r"\bmma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma_|v_smfmac|v_wmma_|v_swmmac_"


def waits_first(ptx: str) -> bool:
    """Whether a kernel waits for the previous one before anything else: no branch and no access to global
    memory comes before.
    """
    body = ptx[ptx.index(".entry") :].partition("{")[2]
    before, waits, _ = body.partition("griddepcontrol.wait")
    return bool(waits) and not re.search(_BRANCH_OR_ACCESS, before, re.MULTILINE)


# Loads of parameters are allowed: they are constants of the launch.
_BRANCH_OR_ACCESS = r"^\s*(\$L__BB|@|bra\b|call\b|(ld|st|atom|red|prefetch)\S*\.global|cp\.|(ld|st)\.\w+\s)"


def _of_cubin(cubin: bytes) -> dict[str, Any]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {"registers": numbers["REG"], "spilled": numbers["STACK"] + numbers["LOCAL"]}


def _of_isa(text: str) -> dict[str, Any]:
    registers, private = (
        int(re.search(rf"\.{field}:\s*(\d+)", text)[1])  # type: ignore[index]
        for field in ("vgpr_count", "private_segment_fixed_size")
    )
    return {"registers": registers, "spilled": private}


def main(name: str, journal: Path, words: Sequence[str]) -> None:
    imitate(name)
    from benchmarks.compiled.cases import CASES
    from liger_models.kernels._gpu import gpu

    cache = journal.with_suffix(".cache.json")
    known: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {}
    seen: set[str] = set()
    case = ""
    with journal.open("w") as file:

        def write(**entry: Any) -> None:
            file.write(json.dumps({"case": case, **entry}) + "\n")
            file.flush()

        def take(kernel: Any, kwargs: dict[str, Any], compiled: Any) -> None:
            blocks = {key: str(value) for key, value in kwargs.items() if key.isupper()}
            options = {key: kwargs[key] for key in ("num_warps", "num_stages") if key in kwargs}
            about = {"kernel": kernel.fn.__name__, "blocks": blocks, **options}
            if isinstance(compiled, Exception):
                write(**about, error=_first_line(compiled))
            elif compiled.hash not in seen:
                seen.add(compiled.hash)
                if compiled.hash not in known:
                    known[compiled.hash] = measure(compiled, bool(kwargs.get("launch_pdl")))
                write(**about, **known[compiled.hash])

        if not gpu(None).matrix_units:
            return  # the plain twins run
        compile_instead(name, take)
        for case, run in CASES.items():
            if not words or any(word in case for word in words):
                write(begins=True)  # the last one, if the compiler crashes
                try:
                    run()
                except Exception as error:
                    write(raises=_first_line(error), trace=traceback.format_exc()[-2000:])
    cache.write_text(json.dumps(known))


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "unsupported" in line]
    return f"{type(error).__name__}: {(telling or lines or ['no message'])[0][:300]}"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
