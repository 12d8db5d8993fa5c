"""Print the kernels that batches of several lengths would compile on a Hopper GPU, one line of JSON for each
length; test_compilation.py runs this. Nothing is compiled.
"""

import json
from typing import Any

from benchmarks.compiled.gpus import imitate


def main() -> None:
    imitate("sm_90")
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from benchmarks.compiled.launches import NoDevice

    compiled: list[str] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        launch(self, *args, **{**kwargs, "warmup": True})

    def note(self: Any, key: Any, signature: Any, device: Any, *_: Any) -> object:
        compiled.append(f"{self.fn.__module__}.{self.fn.__name__}")
        self.device_caches[device][0][key] = kernel = object()
        return kernel

    driver.set_active(NoDevice("sm_90"))
    JITFunction.run, JITFunction._do_compile = run, note
    for tokens in (4096, 4095, 4090, 4001):
        before = len(compiled)
        step(tokens)
        print(json.dumps({"tokens": tokens, "kernels": compiled[before:]}), flush=True)


def step(tokens: int) -> None:
    """The operations of dense layers, of experts and of the loss."""
    from benchmarks.compiled import cases

    cases.TOKENS = tokens
    for name in ("norms, 4096", "rotary, LLaMA 8B", "q/k norm, Qwen 3 8B", "cross entropy, Gemma 2"):
        cases.CASES[name]()
    for name in ("attention, LLaMA 8B", "attention, gpt-oss 20B", "attention, SigLIP"):
        cases.CASES[name]()
    cases.gated(14336)
    cases.experts(tokens, 2048, 768, 128, 8)
    cases.experts(tokens, 2048, 768, 128, 8, rank=16)


if __name__ == "__main__":
    main()
