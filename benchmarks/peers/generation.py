"""Generation by transformers, and a timer for any generator.

Nothing of ours is imported here: `training/alone.py` runs the same code in a process that has never seen it.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Generate = Callable[[Tensor], Tensor]  # ids [batch, prompt] -> [batch, prompt + new]


def build_generator(
    config: Mapping[str, Any], reference: str, static: bool, new: int, device: torch.device
) -> Generate:
    """Build the class `reference` of transformers with random weights in bfloat16, and its dynamic or static
    cache.
    """
    import transformers

    settings = copy.deepcopy(dict(config))
    settings.pop("model_type")
    kind = getattr(transformers, reference)
    with device:
        model = kind._from_config(kind.config_class(**settings), dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    options = {"cache_implementation": "static"} if static else {}

    def generate(ids: Tensor) -> Tensor:
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)

    return generate


def time_generation(generate: Generate, ids: Tensor, new: int, runs: int) -> dict[str, Any]:
    """The median of the runs after the first, and their spread, in milliseconds of each new token."""
    times = []
    for _ in range(1 + runs):
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        begin = time.perf_counter()
        text = generate(ids)
        if ids.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        if text.shape[1] != ids.shape[1] + new:
            raise RuntimeError(f"asked for {new} tokens, and got {text.shape[1] - ids.shape[1]}")
    timed = times[1:]
    median = statistics.median(timed)
    return {
        "tokens_per_second": len(ids) * new / median,
        "token_ms": 1e3 * median / new,
        "token_ms_low": 1e3 * min(timed) / new,
        "token_ms_high": 1e3 * max(timed) / new,
        "first_s": times[0],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if ids.is_cuda else None,
    }


def measure_alone(asked: Mapping[str, Any]) -> dict[str, float]:
    """The milliseconds of a whole run, for `training/alone.py`."""
    new, device = asked["new"], asked["device"]
    generate = build_generator(asked["config"], asked["reference"], asked["static"], new, device)
    found = time_generation(generate, asked["ids"].to(device), new, asked["runs"])
    return {"step_ms": new * found["token_ms"]}
