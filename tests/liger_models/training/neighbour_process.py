"""Use the library in a fresh process, and write the process state changed by each step as JSON.

python neighbour_process.py CHECKPOINT DATA OUTPUT
"""

from __future__ import annotations

import contextlib
import gc
import json
import locale
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path

import torch

# State that torch keeps per thread, which a context may change for its own thread.
OF_A_THREAD = (
    "grad", "autocast", "dispatch", "stream", "python_arg", "tls", "torch_function", "functorch", "view",
    "multithreading", "data", "storage", "saved_tensors", "checkpoint", "cuda_device", "_device",
)  # fmt: skip


def state() -> dict[str, str]:
    """Process state that other code can observe, by name."""
    found = {
        "environment": sorted(os.environ.items()),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "warning filters": warnings.filters,
        "showwarning": warnings.showwarning,
        "logging": sorted((name, logging.getLogger(name).level) for name in ("", "torch", "py.warnings")),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "random": random.getstate(),
        "torch's random": torch.get_rng_state().tolist(),
        "torch's seed": torch.initial_seed(),
        "garbage": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "path": sys.path,
        "hooks": (sys.excepthook, sys.displayhook, threading.excepthook, sys.gettrace(), sys.getprofile()),
        "limits": (sys.getrecursionlimit(), sys.getswitchinterval(), locale.setlocale(locale.LC_ALL)),
        "folder": os.getcwd(),
        "default device": torch.get_default_device(),
        "default dtype": torch.get_default_dtype(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "inductor": "torch._inductor" in sys.modules,
    }
    for name in dir(torch._C):
        if name.startswith(("_get_", "get_")) and not name.startswith(("_get_cpp", "get_cpu")):
            # Some take arguments or need a GPU.
            with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
                value = getattr(torch._C, name)()
                if isinstance(value, bool | int | float | str | list | tuple | torch.dtype):
                    found[f"torch._C.{name}"] = value
    return {name: repr(value) for name, value in found.items()}


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


class Setters:
    """Record each call that changes process state, even if it is undone later."""

    def __init__(self) -> None:
        self.called: list[str] = []
        for name in dir(torch._C):
            if name.startswith(("_set_", "set_")) and not any(word in name for word in OF_A_THREAD):
                self.watch(torch._C, name)
        for owner, name in (
            (torch, "manual_seed"), (torch, "set_rng_state"), (torch.random, "manual_seed"),
            (torch.random, "set_rng_state"), (torch.random, "fork_rng"), (random, "seed"),
            (random, "setstate"), (warnings, "simplefilter"), (warnings, "filterwarnings"),
            (warnings.catch_warnings, "__enter__"), (signal, "signal"), (logging.Logger, "setLevel"),
            (type(os.environ), "__setitem__"), (type(os.environ), "__delitem__"), (gc, "disable"),
            (multiprocessing, "set_start_method"), (torch.nn.attention, "sdpa_kernel"),
        ):  # fmt: skip
            self.watch(owner, name)

    def watch(self, owner, name: str) -> None:
        real = getattr(owner, name)
        if not callable(real):
            return

        def noted(*args, **kwargs):
            frame, own = sys._getframe(1), False
            while frame is not None and not own:
                own = frame.f_globals.get("__name__", "").startswith("liger_models")
                frame = frame.f_back
            if own:
                self.called.append(name)
            return real(*args, **kwargs)

        with contextlib.suppress(TypeError, AttributeError):
            setattr(owner, name, noted)

    def take(self) -> list[str]:
        called, self.called = sorted(set(self.called)), []
        return called


def steps(checkpoint: str, data: str, output: str):
    """Yield the name and action of each use of the library."""

    def load():
        return liger_models.from_hub(checkpoint)

    def level(name: str):
        model = load()
        model.set_activation_memory(name, "1GiB" if name == "auto" else None)
        ids = torch.arange(24).view(2, 12)
        model(ids, labels=ids).loss.backward()
        model(ids.view(1, -1), labels=ids.view(1, -1), cu_seqlens=torch.tensor([0, 5, 24])).loss.backward()

    def optimize():
        model = load()
        optimizer = liger_models.optim.AdamW(model.parameters(), lr=1e-3, weights="stochastic")
        ids = torch.arange(24).view(2, 12)
        model(ids, labels=ids).loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()

    def sample():
        load().eval().generate(torch.arange(4)[None], max_new_tokens=3, temperature=0.8, seed=0)

    def train():
        from liger_models.training import TrainConfig, train

        train(TrainConfig(model=checkpoint, data=(data,), output=output, steps=2, seq_len=32, device="cpu"))

    def register():
        import liger_models.hf

        liger_models.hf.register()

    def in_transformers():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(checkpoint).train()
        ids = torch.arange(24).view(2, 12)
        model(ids, labels=ids).loss.backward()
        model.save_pretrained(output + "-transformers")
        model.eval().generate(ids, max_new_tokens=2, do_sample=False)

    yield "import", lambda: None
    yield "loading", load
    from liger_models.layers.recompute.activation_memory import LEVELS

    for one in (*LEVELS, "auto"):
        yield one, lambda one=one: level(one)
    yield "optimizer", optimize
    yield "saving", lambda: load().save_pretrained(output + "-saved")
    yield "generation", sample
    yield "train", train
    yield "register", register
    yield "transformers", in_transformers


def use_transformers(checkpoint: str, data: str) -> None:
    """Use the other libraries first, so that their own changes to the process precede the test."""
    import matplotlib.font_manager  # noqa: F401
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(data + "-theirs")
    model.eval().generate(torch.arange(4)[None], max_new_tokens=2, do_sample=False)


if __name__ == "__main__":
    import torch.nn.attention

    torch.optim.SGD([torch.zeros(1)])  # torch's optimizers import its compiler, which sets a variable
    use_transformers(*sys.argv[1:3])
    random.seed(1)
    torch.manual_seed(1)
    setters, before, report = Setters(), state(), {}
    import liger_models

    for name, action in steps(*sys.argv[1:4]):
        action()
        after = state()
        if after != before:  # garbage may hold what is left; to collect it after each step takes seconds
            gc.collect()
            after = state()
        report[name] = {"left": changes(before, after), "called": setters.take()}
        before = after
    Path(sys.argv[3] + ".json").write_text(json.dumps(report))
