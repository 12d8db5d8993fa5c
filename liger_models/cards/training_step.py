"""The card's GPU benchmark: a training step at real widths against transformers, and transformers with
liger-kernel.

    for family, passed, values in measure(families, repository):
        ...

A family is measured with its smallest published model and as many of its first layers as fit. Peers run in
every setting that may be their fastest: attention backends, experts implementations and, on request,
torch.compile. `benchmarks/training`, in a checkout, measures all families in one run, with each family's
providers on the same GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import liger_models
from liger_models.architectures import Architecture
from liger_models.cards.published import count_layers, layers_of_every_kind, published, with_layers
from liger_models.cards.results import OURS, PEERS
from liger_models.cards.workshop import NotRun
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import LigerModelsError
from liger_models.layers.specs import AttentionSpec, ModelSpec

TOKENS, TOKENS_OF_A_STEP = 4096, 2 * 4096  # per row, if the model allows
WARMUP, STEPS = 2, 5
TIME_LIMIT = 60.0  # seconds per provider
# Weights, gradients and both moments in bfloat16; logits of a peer in bfloat16 and twice in float32.
BYTES_OF_A_PARAMETER, BYTES_OF_A_LOGIT = 8, 10
SHARE = 0.35  # of the memory for these; the rest is for activations

Outcome = tuple[bool, Mapping[str, Any]]


def measure(
    families: Sequence[Architecture],
    repository: Path,
    devices: Sequence[str] | None = None,
    compiled: bool = False,
) -> Iterator[tuple[Architecture, Outcome | NotRun]]:
    """Yield each family with its result when ready, or with the reason why it cannot be measured.

    Args:
        families: the families to measure.
        repository: a checkout, for published configs and the benchmarks.
        devices: each measures one family at a time; None: all GPUs.
        compiled: also measure peers under torch.compile, which takes minutes each.
    """
    if devices is None:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    plans = {}
    for family in families:
        try:
            plans[family.model_type] = plan(family, repository, devices, compiled)
        except NotRun as reason:
            yield family, reason
        except LigerModelsError as error:  # affects one family only
            yield family, NotRun(f"a config that can be cut to fewer layers: {error}")
    if not plans:
        return
    results: dict[str, dict[str, Any]] = {name: {} for name in plans}
    by_name = {family.model_type: family for family in families}
    for job, result in _run(list(plans.values()), repository, devices):
        name = job["config"]["model_type"]
        results[name][job["provider"]] = _shortened(result)
        if len(results[name]) == len(plans[name]):
            yield by_name[name], outcome(plans[name][0], results[name])


def plan(
    family: Architecture, repository: Path, devices: Sequence[str], compiled: bool = False
) -> list[dict[str, Any]]:
    """One job per provider, in the form of `benchmarks/training/step.py`.

    Raises:
        NotRun: a requirement is missing here.
    """
    if not devices:
        raise NotRun("needs a GPU")
    if not (repository / "benchmarks" / "training").is_dir():
        raise NotRun("needs a checkout with the benchmarks")
    known = published(family, repository)
    if not known:
        raise NotRun("needs a published config of the family")
    config = dict(known[0].config)
    if config.get("first_k_dense_replace", 0) > 1:  # one of the leading dense layers suffices
        config["first_k_dense_replace"] = 1
    limits = config.get("max_position_embeddings"), family.spec(HFConfig.load(config)).position_limit
    tokens = min(TOKENS, *(limit or TOKENS for limit in limits))
    batch, data = TOKENS_OF_A_STEP // tokens, "full"
    if family.vision:
        tokens, data = tokens // 2, "images"  # text tokens; images come on top
    config = with_layers(config, layers_that_fit(config, _memory(devices[0])))
    job = {"model": known[0].name, "config": config, "batch": batch, "seq": tokens}
    job |= {"warmup": WARMUP, "steps": STEPS, "data": data}
    theirs = settings_of_peers(family.spec(HFConfig.load(config)), tokens, compiled)
    return [
        job | {"provider": OURS, "memory": "lean"},
        *(job | {"provider": provider, "memory": "none"} for provider in theirs),
    ]


def settings_of_peers(spec: ModelSpec, tokens: int, compiled: bool = False) -> list[str]:
    """Settings that may be a peer's fastest: SDPA has no soft cap and no sinks, and implements windows with a
    mask, which transformers creates only if the tokens exceed the window; experts are grouped products or a
    loop. `compiled` adds the settings that may be fastest under torch.compile.
    """
    attention = [m for block in spec.blocks for m in block.mixers if isinstance(m, AttentionSpec)]
    if any(part.slopes for part in attention):  # the families' own code, which is eager
        kinds = ["eager"]
    elif any(part.softcap or part.sinks for part in attention):
        kinds = ["flex_attention", "eager"]
    elif any(part.window is not None and part.window <= tokens for part in attention):
        kinds = ["sdpa", "flex_attention"]
    else:
        kinds = ["sdpa"]
    has_experts = any(block.mixture for block in spec.blocks)
    grouped = "+grouped_mm" if has_experts else ""
    settings = [f"{peer}+{kind}{grouped}" for peer in PEERS for kind in kinds]
    if has_experts:
        settings += [f"{PEERS[0]}+{kinds[0]}", f"{PEERS[1]}+{kinds[0]}+loop"]
    if compiled:
        fast = [kind for kind in kinds if kind != "eager"]
        settings += [f"{peer}+{kind}{grouped}+compile" for peer in PEERS for kind in fast]
    return settings


def layers_that_fit(config: Mapping[str, Any], memory: int) -> int:
    """Number of layers that train comfortably in `memory` bytes; at least enough to include each kind."""
    model = liger_models.from_config(config, device="meta")
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in model.layers]
    left = SHARE * memory - BYTES_OF_A_LOGIT * TOKENS_OF_A_STEP * model.spec.vocab_size
    left -= BYTES_OF_A_PARAMETER * (model.num_parameters() - sum(sizes))
    fitting = sum(BYTES_OF_A_PARAMETER * total <= left for total in accumulate(sizes))
    return max(fitting, layers_of_every_kind(config))


def outcome(job: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> Outcome:
    """A family's results by provider; passed if ours was measured."""
    return "tokens_per_second" in results[OURS], {
        "model": job["model"],
        "layers": count_layers(job["config"]),
        "batch": job["batch"],
        "tokens": job["seq"],
        "data": job["data"],
        "own_processes": True,
        "providers": dict(results),
    }


def _shortened(result: Mapping[str, Any]) -> dict[str, Any]:
    if "tokens_per_second" not in result:
        return {"note": result["note"]}
    peak = result["peak_gib"]
    return {
        "tokens_per_second": round(result["tokens_per_second"], 1),
        "gib": None if peak is None else round(peak, 2),
    }


def _memory(device: str) -> int:
    on = torch.device(device)
    return torch.cuda.get_device_properties(on).total_memory if on.type == "cuda" else 1 << 34


def _run(
    groups: Sequence[Sequence[Mapping[str, Any]]], repository: Path, devices: Sequence[str]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Run jobs in the benchmarks' own process; yields them with their results as they finish."""
    asked = {"groups": groups, "devices": list(devices), "time_limit": TIME_LIMIT}
    asked["ahead"] = all(device.startswith("cuda") for device in devices)
    command = [sys.executable, "-m", "benchmarks.training"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(repository), *filter(None, sys.path)])}
    with subprocess.Popen(
        command, cwd=repository, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        json.dump(asked, process.stdin)
        process.stdin.close()
        for line in process.stdout:
            found = json.loads(line)
            yield found["job"], found["result"]
    if process.returncode != 0:
        raise RuntimeError(f"`python -m benchmarks.training` ended with exit code {process.returncode}")
