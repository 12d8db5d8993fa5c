"""The card's GPU benchmark: a training step at real widths against transformers, and transformers with
liger-kernel.

    for family, passed, values in measure(families, repository):
        ...

A family is measured with its smallest published model, or the defaults of its config class, and as many of
its first layers as make a step of a few hundred milliseconds; if one layer of each kind is too large, with
fewer experts. Peers run in every setting that may be their fastest: attention backends, experts
implementations, packages with kernels of recurrent layers that are installed and, on request, torch.compile.
`benchmarks/training`, in a checkout, measures all families in one run, with each family's providers on the
same GPU.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import liger_models
from liger_models.architectures import Architecture, find_architecture
from liger_models.cards.peers import has_experts_choice, has_sdpa, kinds_of_attention, settings_of_peers
from liger_models.cards.published import (
    FOLDER,
    Published,
    count_layers,
    layers_of_every_kind,
    published,
    read_published,
    with_layers,
)
from liger_models.cards.results import OURS
from liger_models.cards.workshop import NotRun
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import LigerModelsError
from liger_models.layers.parts.embedding import TokenEmbedding
from liger_models.models.verification import config_class

TOKENS, TOKENS_OF_A_STEP = 4096, 2 * 4096  # per row, if the model allows
EAGER_TOKENS = 2048  # per row, if every peer's scores are kept
OPERATIONS, MOST_ROWS = 2.5e13, 4  # rows of small models are doubled up to so many operations of a step
# In a step with fewer operations than these, launching the kernels may take the host longer than they run, so
# ours is measured with CUDA graphs, too.
FEW_OPERATIONS = 1e14
WARMUP, STEPS = 2, 5
TIME_LIMIT = 60.0  # seconds per provider
TOGETHER = 4  # providers that prepare on a GPU at once, before each is timed alone
# Weights, gradients and both moments in bfloat16; logits of a peer in bfloat16 and twice in float32.
BYTES_OF_A_PARAMETER, BYTES_OF_A_LOGIT = 8, 10
SHARE = 0.35  # of the memory for these; the rest is for activations
MOST_MEMORY, MOST_MEMORY_FOR_EXPERTS = (
    96 * 10**9,
    115 * 10**9,
)  # which a larger GPU is taken to have: steps stay short
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
FEWEST_TO_SHARE = 8  # families from which on cores share the planning
FEWEST_LAYERS, MOST_LAYERS_OF_EXPERTS = 4, 12

LATE = "no time was left for it"  # the benchmarks' note

Outcome = tuple[bool, Mapping[str, Any]]


def measure(
    families: Sequence[Architecture],
    repository: Path,
    devices: Sequence[str] | None = None,
    compiled: bool = False,
    within: float = math.inf,
) -> Iterator[tuple[Architecture, Outcome | NotRun]]:
    """Yield each family with its result when ready, or with the reason why it cannot be measured.

    Args:
        families: the families to measure.
        repository: a checkout, for published configs and the benchmarks.
        devices: each measures one family at a time; None: all GPUs.
        compiled: also measure peers under torch.compile, which takes minutes each.
        within: seconds for all; families that are not ready by then have no result.
    """
    end = time.monotonic() + within
    if devices is None:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if not devices or not (repository / "benchmarks" / "training").is_dir():
        for family in families:
            reason = _try_to_plan(family.model_type, repository, devices)
            assert isinstance(reason, NotRun)
            yield family, reason
        return
    with _begin(repository) as process:
        try:
            yield from _measure(process, families, repository, devices, compiled, end)
        finally:
            process.kill()


def _measure(
    process: subprocess.Popen[str],
    families: Sequence[Architecture],
    repository: Path,
    devices: Sequence[str],
    compiled: bool,
    end: float,
) -> Iterator[tuple[Architecture, Outcome | NotRun]]:
    plans = {}
    for family, found in zip(families, _plan_all(families, repository, devices, compiled), strict=True):
        if isinstance(found, NotRun):
            yield family, found
        else:
            plans[family.model_type] = found
    if not plans:
        return
    results: dict[str, dict[str, Any]] = {name: {} for name in plans}
    by_name = {family.model_type: family for family in families}
    for job, result in _run(process, list(plans.values()), devices, end - time.monotonic()):
        name = job["config"]["model_type"]
        results[name][job["provider"]] = _shortened(result)
        if len(results[name]) == len(plans[name]):
            late = LATE in (one.get("note") for one in results[name].values())
            yield by_name[name], NotRun(LATE) if late else outcome(plans[name][0], results[name])


def _plan_all(families: Sequence[Architecture], *arguments: Any) -> list[list[dict[str, Any]] | NotRun]:
    """The jobs of each family, or why it has none. Planning many takes all cores: seconds each."""
    names = [family.model_type for family in families]
    if len(names) >= FEWEST_TO_SHARE:
        with contextlib.suppress(ImportError):
            import transformers  # noqa: F401  # once, before the forks
        fork = multiprocessing.get_context("fork")
        # Raises if this process has used a GPU, whose context does not survive a fork.
        with (
            contextlib.suppress(RuntimeError),
            ProcessPoolExecutor(None, fork, torch.set_num_threads, (1,)) as pool,
        ):
            begun = [pool.submit(_try_to_plan, name, *arguments) for name in names]
            return [one.result() for one in begun]
    return [_try_to_plan(name, *arguments) for name in names]


def _try_to_plan(model_type: str, *arguments: Any) -> list[dict[str, Any]] | NotRun:
    try:
        return plan(find_architecture(model_type), *arguments)
    except NotRun as reason:
        return reason
    except LigerModelsError as error:  # affects one family only
        return NotRun(f"a config that can be cut to fewer layers: {error}")


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
    known = published(family, repository) or _language_models(family.model_type, repository)
    known = known or defaults(family, repository)
    if not known:
        raise NotRun("needs a published config of the family")
    config = dict(known[0].config)
    if config.get("first_k_dense_replace", 0) > 1:  # one of the leading dense layers suffices
        config["first_k_dense_replace"] = 1
    limits = config.get("max_position_embeddings"), family.spec(HFConfig.load(config)).position_limit
    name = known[0].name
    experts, config = _experts(config), cut(config, _memory(devices[0]))
    if _experts(config) != experts:
        name = f"{name} with {_experts(config)} of {experts} experts"
    spec = family.spec(HFConfig.load(config))
    sdpa = has_sdpa(family)
    most = EAGER_TOKENS if kinds_of_attention(spec, TOKENS, sdpa) == ["eager"] else TOKENS
    tokens = min(most, *(limit or most for limit in limits))
    batch, data = TOKENS_OF_A_STEP // tokens, "full"
    if family.vision:
        tokens, data = tokens // 2, "images"  # text tokens; images come on top
    if family.vision and not sdpa:
        batch = max(1, batch // 2)  # an encoder's scores of all pairs of patches take most of the memory
    else:
        batch *= more_rows(config, batch * tokens)
    job = {"model": name, "config": config, "batch": batch, "seq": tokens}
    job |= {"warmup": WARMUP, "steps": STEPS, "data": data}
    ours = [OURS]
    # Layers that choose keys read where documents begin on the host, which graphs cannot record.
    chooses = any(getattr(mixer, "indexer", None) for block in spec.blocks for mixer in block.mixers)
    if not chooses and operations(config, batch * tokens) < FEW_OPERATIONS:
        ours.append(f"{OURS}+graphs")
    theirs = settings_of_peers(spec, tokens, compiled, sdpa, has_experts_choice(family))
    return [
        *(job | {"provider": provider, "memory": "lean"} for provider in ours),
        *(job | {"provider": provider, "memory": "none"} for provider in theirs),
    ]


def defaults(family: Architecture, repository: Path) -> list[Published]:
    """A model with the default sizes of the config class, if transformers has it. If these make no model, ids
    of placeholders are added, and then the language model is replaced by a published one of its kind.
    """
    try:
        values = config_class(family)().to_dict()
    except (ImportError, AttributeError):
        return []
    config = {key: value for key, value in values.items() if value is not None}
    for name, tried in _tries(f"{family.model_type}-defaults", config, family.tiny, repository):
        _reconcile(tried)
        with contextlib.suppress(AttributeError, KeyError, LigerModelsError):
            parameters = liger_models.from_config(tried, device="meta").num_parameters()
            return [Published(name, parameters, tried)]
    return []


def _tries(
    name: str, config: dict[str, Any], tiny: Mapping[str, Any], repository: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    yield name, copy.deepcopy(config)
    text = config.get("text_config", {})
    missing = [key for key, id in tiny.items() if key.endswith("_id") and isinstance(id, int)]
    missing = [key for key in missing if key not in config]
    last = text.get("vocab_size", config.get("vocab_size", 0)) - 1
    config = {**config, **{key: last - i for i, key in enumerate(missing)}}
    yield name, copy.deepcopy(config)
    for other in _language_models(text.get("model_type"), repository):
        text = {"text_config": copy.deepcopy(dict(other.config))}
        yield f"{name} with the {other.name}", {**copy.deepcopy(config), **text}


def _language_models(model_type: str | None, repository: Path) -> list[Published]:
    """Known language models of a type, alone or as part of a multimodal model, smallest first."""
    known = [read_published(path) for path in sorted((repository / FOLDER).glob("*.json"))]
    found = [
        one for one in known if one.config.get("text_config", one.config).get("model_type") == model_type
    ]
    found = [
        replace(one, name=f"language model of {one.name}", config=one.config.get("text_config", one.config))
        for one in found
    ]
    return sorted(found, key=lambda model: (model.parameters, model.name))


def _reconcile(config: dict[str, Any]) -> None:
    """Change defaults of a vision-language model's parts that do not fit each other, as published configs do:
    a vocabulary without the placeholders of images, and an encoder whose output has another width.
    """
    text, vision = config.get("text_config", {}), config.get("vision_config", {})
    last = max((config.get(key, 0) for key in ("image_token_id", "image_token_index")), default=0)
    if text.get("vocab_size", math.inf) <= last:
        text["vocab_size"] = -(-(last + 1) // 64) * 64
    if "out_hidden_size" in vision and "hidden_size" in text:
        vision["out_hidden_size"] = text["hidden_size"]


def cut(config: Mapping[str, Any], memory: int) -> dict[str, Any]:
    """The config with as many layers as fit in `MOST_MEMORY` of the memory; with fewer experts, if that
    is only one, or one layer of each kind does not fit.
    """
    spec = find_architecture(config["model_type"]).spec(HFConfig.load(dict(config)))
    enough = min(FEWEST_LAYERS, len(spec.blocks))
    if _halve_experts(config) is not None:  # more do not fit, and take long to count
        most = max(layers_of_every_kind(config, numbers=False), MOST_LAYERS_OF_EXPERTS)
        config = with_layers(config, min(most, len(spec.blocks)))
    while True:
        layers, fits = layers_that_fit(config, min(memory, MOST_MEMORY_FOR_EXPERTS))
        fewer = None if fits and layers >= min(2, enough) else _halve_experts(config)
        if fewer is None:
            break
        config = fewer
    layers, _ = layers_that_fit(config, min(memory, MOST_MEMORY))
    if layers < enough:
        layers = max(layers, min(enough, layers_that_fit(config, memory)[0]))
    return with_layers(config, layers)


def _halve_experts(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config with half of the experts; None if so few would leave no choice."""
    if "text_config" in config:
        text = _halve_experts(config["text_config"])
        return None if text is None else {**config, "text_config": text}
    halves = {key: config[key] // 2 for key in EXPERTS if config.get(key)}
    chosen = next((config[key] for key in CHOSEN if config.get(key)), 1)
    if not halves or min(halves.values()) < 2 * chosen:
        return None
    return {**config, **halves}


def _experts(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config", config)
    return next((text[key] for key in EXPERTS if text.get(key)), None)


def more_rows(config: Mapping[str, Any], tokens: int) -> int:
    """A factor for the rows of a small model, whose step would be too short to measure."""
    vocab = liger_models.from_config(config, device="meta").spec.vocab_size
    factor = 1
    while factor * operations(config, tokens) < OPERATIONS and factor < MOST_ROWS:
        if BYTES_OF_A_LOGIT * 2 * factor * tokens * vocab > MOST_MEMORY / 4:
            break
        factor *= 2
    return factor


def operations(config: Mapping[str, Any], tokens: int) -> float:
    """Those of the weights' products in a step with so many tokens; tables that are looked up have none."""
    model = liger_models.from_config(config, device="meta")
    tables = sum(part.weight.numel() for part in model.modules() if isinstance(part, TokenEmbedding))
    head = model.embed_tokens.weight.numel() if model.spec.tie_word_embeddings else 0
    return 6.0 * (model.num_parameters() - tables + head) * tokens


def layers_that_fit(config: Mapping[str, Any], memory: int) -> tuple[int, bool]:
    """Number of layers that train comfortably in `memory` bytes, at least enough to include each kind; and
    whether these fit.
    """
    model = liger_models.from_config(config, device="meta")
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in model.layers]
    left = SHARE * memory - BYTES_OF_A_LOGIT * TOKENS_OF_A_STEP * model.spec.vocab_size
    left -= BYTES_OF_A_PARAMETER * (model.num_parameters() - sum(sizes))
    fitting = sum(BYTES_OF_A_PARAMETER * total <= left for total in accumulate(sizes))
    needed = layers_of_every_kind(config)
    if needed > fitting:
        needed = layers_of_every_kind(config, numbers=False)
    # The layers of an encoder whose output is added to layers of the language model.
    needed = max(needed, len(config.get("vision_config", {}).get("deepstack_visual_indexes", ())))
    return max(fitting, needed), needed <= fitting


def outcome(job: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> Outcome:
    """A family's results by provider; passed if ours was measured."""
    return any("tokens_per_second" in results[name] for name in results if name.startswith(OURS)), {
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


def _begin(repository: Path) -> subprocess.Popen[str]:
    """The benchmarks' own process, which imports meanwhile, and waits for jobs."""
    command = [sys.executable, "-m", "benchmarks.training"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(repository), *filter(None, sys.path)])}
    return subprocess.Popen(
        command, cwd=repository, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _run(
    process: subprocess.Popen[str],
    groups: Sequence[Sequence[Mapping[str, Any]]],
    devices: Sequence[str],
    within: float,
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Run jobs in the benchmarks' process; yields them with their results as they finish."""
    asked = {"groups": groups, "devices": list(devices), "time_limit": TIME_LIMIT}
    asked |= {"within": within if math.isfinite(within) else None, "together": TOGETHER}
    asked["ahead"] = all(device.startswith("cuda") for device in devices)
    assert process.stdin is not None
    assert process.stdout is not None
    json.dump(asked, process.stdin)
    process.stdin.close()
    for line in process.stdout:
        found = json.loads(line)
        yield found["job"], found["result"]
    if process.wait() != 0:
        raise RuntimeError(f"`python -m benchmarks.training` ended with exit code {process.returncode}")
