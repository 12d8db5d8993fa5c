"""A training step of one model and one provider, measured in this process.

Random weights in bfloat16, random tokens, torch's fused AdamW in bfloat16. A step is forward, backward,
optimizer step and zero_grad; after untimed steps, steps are timed by device events without synchronisation
between them. A provider is a library with options:

    ours[+split|+compile|+graphs][+WEIGHTS][+FLOAT8]
    transformers[+liger][+kernels][+compile|+regional][+ATTENTION][+EXPERTS][+PACKAGE][+FLOAT8]

`graphs` records the layers (`set_cuda_graphs`). `compile` is torch.compile of the model, and `regional` of
each of its layers, which compiles one of them for all. WEIGHTS uses our AdamW instead of torch's, with this
weight mode (`liger_models.optim.AdamW`). FLOAT8 is a recipe of `set_float8`, or of torchao's
`convert_to_float8_training`. ATTENTION and EXPERTS are values of transformers' `attn_implementation` and
`experts_implementation` (`loop` is its eager); the default is its own choice. With an EXPERTS, liger-kernel
leaves the experts to transformers. PACKAGE is one or more of fla, mamba_ssm and causal_conv1d, whose kernels
transformers uses if they are installed: a step that does not run them is no result. `varlen` is torch's
FlashAttention 2 over documents, in place of flash_attention_2, and `kernels` is `use_kernels=True`.
`peer.py` builds and times peers.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.training.batches import IMAGES, MASKED, count_tokens, make_batch, rows_of
from benchmarks.training.peer import (
    OPTIONS,
    PACKAGES,
    build_peer,
    check_packages,
    document_bounds,
    fused_adamw,
    in_one_line,
    lacking,
    summary,
    time_steps,
    train_step,
    tune_briefly,
)
from liger_models.architectures import find_architecture
from liger_models.cards.published import count_layers, layers_of_every_kind, with_layers
from liger_models.kernels.optimizer.adamw import WEIGHTS
from liger_models.layers.projections.float8 import RECIPES, Float8Recipe
from liger_models.optim.adamw import AdamW, state_bytes
from liger_models.training.observing.profiling import by_class

LIBRARIES: Mapping[str, Set[str]] = {
    "ours": {"split", "compile", "graphs", *WEIGHTS, *RECIPES},
    "transformers": OPTIONS,
}

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """A measurement.

    Attributes:
        model: its name.
        config: its config.json.
        provider: see above.
        memory: for ours a level of activation memory, "auto", 'auto=25' within so many GiB, or
            'lean,checkpoint=4': all lean, the last 4 layers checkpoint; for others none or checkpoint.
        batch, seq: sequences, and tokens in each; or documents, and their maximum length.
        data: kind of batch, see batches.py.
        warmup, steps: numbers of untimed and of timed steps.
        profile: also profile the step's kernels by purpose.
    """

    model: str
    config: Mapping[str, Any]
    provider: str
    memory: str = "lean"
    batch: int = 2
    seq: int = 4096
    warmup: int = 2
    steps: int = 5
    profile: bool = False
    data: str = "full"

    @property
    def library(self) -> str:
        return self.provider.partition("+")[0]

    @property
    def options(self) -> set[str]:
        return set(self.provider.split("+")[1:])

    @property
    def ours(self) -> bool:
        return self.library == "ours"

    @property
    def under_compile(self) -> bool:
        return bool(self.options & {"compile", "regional"})

    @property
    def weights(self) -> str | None:
        """Weight mode of our AdamW, if requested."""
        return next((name for name in WEIGHTS if name in self.options), None)

    @property
    def float8(self) -> Float8Recipe | None:
        """Recipe of our layers, if requested."""
        return next((recipe for recipe in RECIPES if recipe in self.options), None)

    @property
    def state_bytes(self) -> int:
        """Optimizer state per element: two bfloat16 moments for torch's AdamW."""
        return 4 if self.weights is None else state_bytes(torch.bfloat16, self.weights)

    @property
    def compiles(self) -> bool:
        """Whether the first step compiles something."""
        return self.ours or self.under_compile or bool(self.options & {"liger", "flex_attention", *PACKAGES})


def check_provider(provider: str) -> None:
    """Raise ValueError for an unknown provider."""
    library, *options = provider.split("+")
    known: Set[str] = LIBRARIES.get(library, set())
    if library not in LIBRARIES or not set(options) <= known:
        raise ValueError(
            f"unknown provider {provider!r}; expected for instance ours, ours+split, transformers+liger "
            f"or transformers+sdpa+grouped_mm, of {', '.join(sorted(known or LIBRARIES))}"
        )


def measure(job: Job, device: torch.device, turn: Callable[[], None] | None = None) -> Result:
    """Times and memory, or a `note` with the reason why there are none. `turn` returns when nothing else runs
    on the device; before, only untimed steps are taken.

    Raises:
        Exception: any error of a provider other than running out of memory or not supporting the model.
    """
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    try:
        return _measure(job, device, before, turn)
    except torch.OutOfMemoryError:
        return {"note": "out of memory"}
    except NotImplementedError as lacking:
        return {"note": in_one_line(lacking)}
    finally:
        free(device)


def lacks(job: Job) -> str | None:
    """Missing support or package of the job's peer, known before anything runs; None if there is none."""
    if job.ours:
        return None
    model_type = job.config["model_type"]
    return lacking(model_type, find_architecture(model_type).reference, job.options)


def compile_ahead(job: Job, device: torch.device) -> Result:
    """Run each kernel of a job's step once, with as few layers and as little memory as possible, so that
    Triton's and torch.compile's results are cached on disk.
    """
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # as many jobs as cores run at once
    fewest = layers_of_every_kind(job.config)
    config = job.config if "compile" in job.options else with_layers(job.config, fewest)
    try:
        if job.memory.startswith("auto"):  # with so few layers nothing would be recomputed
            job = replace(job, memory="lean")
        if job.options & PACKAGES.keys():
            os.environ |= {"TRITON_CACHE_AUTOTUNING": "0", "FLA_CACHE_RESULTS": "0"}  # others run meanwhile
            tune_briefly(once=True)
            job = replace(job, batch=2, seq=min(job.seq, 1024))  # Triton compiles the same code
        model = build(job, config, device)
        model(**make_job_batch(job, device)).loss.backward()
        if job.weights is not None:
            AdamW(model.parameters(), weights=job.weights).step()
        return {}
    finally:
        model = None
        free(device)


def _measure(job: Job, device: torch.device, before: int, turn: Callable[[], None] | None) -> Result:
    torch.manual_seed(0)
    cuda = device.type == "cuda"
    if job.options & PACKAGES.keys():
        tune_briefly()
    model = build(job, job.config, device)
    if job.weights is None:
        optimizer = fused_adamw(model, device)
    else:
        optimizer = AdamW(model.parameters(), lr=1e-5, weights=job.weights)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    batch = make_job_batch(job, device)
    times, losses = time_steps(model, optimizer, batch, job.warmup, job.steps, device, turn)
    peak = (torch.cuda.max_memory_allocated(device) - before) / 2**30 if cuda else None
    ran = check_packages(job.options, lambda: train_step(model, optimizer, batch))
    return {
        **summary(times, count_job_tokens(job)),
        "peak_gib": peak,
        "planned_gib": _planned(model, job) if job.ours and job.data != IMAGES else None,
        "first_loss": losses[0].item(),
        "loss": losses[-1].item(),
        "parameters": sum(p.numel() for p in model.parameters()),
        **({"packages": ran} if ran else {}),
        **({"kernels": kernels(job, model, optimizer, device)} if job.profile else {}),
    }


def make_job_batch(job: Job, device: torch.device) -> dict[str, Any]:
    """Batch of a job. Pixels have the weights' dtype, as some encoders of transformers require."""
    batch = make_batch(job.data, job.batch, job.seq, job.config, device)
    if "varlen" in job.options:
        batch |= document_bounds(batch)
    return {name: x.bfloat16() if name.startswith("pixel_values") else x for name, x in batch.items()}


def count_job_tokens(job: Job) -> int:
    return count_tokens(job.data, job.batch, job.seq, job.config)


def kernels(job: Job, model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> Any:
    """Kernels of one more step by purpose."""
    batch = make_job_batch(job, device)
    return by_class(lambda: train_step(model, optimizer, batch), device.type == "cuda")


def _planned(model: Any, job: Job) -> float:
    """Planned peak of our model in GiB."""
    from liger_models.layers.memory import Step, StepMemory

    rows, seq, longest = rows_of(job.data, job.batch, job.seq)
    labels = 1.0 if job.data == "full" else 1 - MASKED
    step = Step(rows, seq, optimizer_bytes=job.state_bytes, longest=longest, labels=labels)
    return StepMemory(model, step).plan(model.activation_memory).peak / 2**30


def build(job: Job, config: Mapping[str, Any], device: torch.device) -> Any:
    """Build the provider's model.

    Raises:
        NotImplementedError: the provider does not support it.
    """
    if job.ours:
        import liger_models

        model: Any = liger_models.from_config(
            config,
            dtype=torch.bfloat16,
            device=device,
            activation_memory=levels(job.memory, count_layers(config)),
            projections="split" if "split" in job.options else "fused",
            float8=job.float8,
        )
        model.set_cuda_graphs("graphs" in job.options)
        if job.memory.startswith("auto"):
            gib = job.memory.partition("=")[2]
            model.set_activation_memory("auto", f"{gib}GiB" if gib else None, job.state_bytes)
        return torch.compile(model) if "compile" in job.options else model
    reference = find_architecture(config["model_type"]).reference
    return build_peer(config, reference, job.options, job.memory, device)


def free(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def levels(memory: str, num_layers: int) -> str | list[str]:
    """'lean' for all layers, or 'lean,checkpoint=4': all lean but the last 4, which are checkpointed. `auto`
    starts as lean.
    """
    if memory.startswith("auto"):
        return "lean"
    if "," not in memory:
        return memory
    level, (other, count) = memory.split(",")[0], memory.split(",")[1].split("=")
    return [level] * (num_layers - int(count)) + [other] * int(count)
