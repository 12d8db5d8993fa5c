"""Steps of post-training by their losses, and TRL's side of them.

Nothing of ours is imported here: `training/alone.py` runs the same code in a process that has never seen it.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

# The outputs that TRL's trainers request from their head.
FIELDS = {
    "sft": ("log_probs", "entropy", "is_top1"),
    "grpo": ("log_probs", "entropy"),
    "dpo": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "kto": ("log_probs", "entropy", "mean_logits", "is_top1"),
}
Score = Callable[[Any, Tensor], Tensor]
Side = tuple[Any, Any, torch.optim.Optimizer, Score]  # policy, reference, optimizer


def build_trl(method: str, config: Mapping[str, Any], device: torch.device, with_reference: bool) -> Side:
    """Build TRL's side, as its trainers run it by default.

    Raises:
        ImportError: without TRL.
    """
    import transformers

    add_fused_lm_head = _trl_module("trainer.utils").add_fused_lm_head
    shape = dict(config)
    kind = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    with torch.device(device):
        policy = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16).train()
        reference = (
            transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16).eval()
            if with_reference
            else None
        )
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    add_fused_lm_head(policy, outputs=FIELDS[method])
    if reference is not None:
        add_fused_lm_head(reference)

    def score(model: Any, ids: Tensor) -> Tensor:
        found = model(ids, labels=ids, fused_lm_head=True, use_cache=False)
        return found.loss if method == "sft" else found.log_probs

    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=device.type == "cuda")
    return policy, reference, optimizer, score


def _trl_module(name: str) -> Any:
    """`benchmarks.trl.trl_module`, by its file: the folder of the checkout is not on the path."""
    file = Path(__file__).parents[1] / "trl.py"
    spec = importlib.util.spec_from_file_location("parts_of_trl", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.trl_module(name)


def time_training(
    method: str, side: Side, vocab_size: int, shape: tuple[int, int], steps: int, device: torch.device
) -> dict[str, Any]:
    """Seconds and peak memory of a step of random rows, the median of all but the first if there are more."""
    policy, reference, optimizer, score = side
    cuda = device.type == "cuda"
    seconds, loss = [], torch.zeros(())
    for number in range(steps):
        if cuda:
            torch.cuda.synchronize(device)
            if number == 1 or steps == 1:  # the first step of several makes the optimizer's state
                torch.cuda.reset_peak_memory_stats(device)
        ids = torch.randint(vocab_size, shape, device=device)
        begun = time.perf_counter()
        loss = METHODS[method](score, policy, reference, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return {
        "peak": torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        "reserved": torch.cuda.max_memory_reserved(device) / 2**30 if cuda else None,
        "seconds": statistics.median(seconds[1:] or seconds),
        "first": seconds[0],
        "loss": loss.item(),
    }


def measure_alone(asked: Mapping[str, Any]) -> dict[str, float]:
    """The milliseconds of a step, for `training/alone.py`."""
    config, device = asked["config"], asked["device"]
    side = build_trl(asked["method"], config, device, asked["with_reference"])
    shape = asked["rows"], asked["tokens"]
    found = time_training(asked["method"], side, config["vocab_size"], shape, asked["steps"], device)
    return {"step_ms": 1e3 * found["seconds"]}


# ------------------------------------------------------------------------------------------------ the methods


def _sft(score: Score, policy: Any, reference: Any, ids: Tensor) -> Tensor:
    return score(policy, ids)


def _grpo(score: Score, policy: Any, reference: Any, ids: Tensor) -> Tensor:
    log_probs = score(policy, ids)
    ratio = (log_probs - log_probs.detach()).exp()
    return -torch.minimum(0.5 * ratio, 0.5 * ratio.clamp(0.8, 1.2)).mean()


def _dpo(score: Score, policy: Any, reference: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        before = score(reference, ids).sum(1)
    chosen, rejected = (score(policy, ids).sum(1) - before).unbind()
    return -logsigmoid(0.1 * (chosen - rejected))


def _kto(score: Score, policy: Any, reference: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        strangers = ids.flip(1)
        divergence = (score(policy, strangers) - score(reference, strangers)).sum(1).mean().clamp(min=0)
        before = score(reference, ids).sum(1)
    good, bad = (score(policy, ids).sum(1) - before).unbind()
    return 1 - 0.5 * ((0.1 * (good - divergence)).sigmoid() + (0.1 * (divergence - bad)).sigmoid())


METHODS = {"sft": _sft, "grpo": _grpo, "dpo": _dpo, "kto": _kto}
