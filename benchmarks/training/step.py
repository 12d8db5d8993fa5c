"""A training step of one model by one provider, measured in this process.

Fresh random weights in bfloat16, random tokens, torch's fused AdamW in bfloat16. A step is forward, backward,
optimizer step and zero_grad; the steps are timed by device events with no waiting between them, after others
untimed. A provider is a library and what is chosen of it:

    ours[+split|+compile][+WEIGHTS]
    transformers[+liger][+compile][+ATTENTION][+EXPERTS]

WEIGHTS takes our AdamW in place of torch's, and says how it keeps the weights (`liger_models.optim.AdamW`).
ATTENTION and EXPERTS are values of transformers' `attn_implementation` and `experts_implementation` (`loop`
is what it calls eager); without them it chooses for itself. With an EXPERTS, liger-kernel leaves the experts
to transformers.
"""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.training.batches import IMAGES, MASKED, count_tokens, make_batch, rows_of
from liger_models.architectures import find_architecture
from liger_models.cards.published import layers_of_every_kind, with_layers
from liger_models.kernels.optimizer.adamw import WEIGHTS
from liger_models.optim import AdamW, state_bytes
from liger_models.training.profiling import by_class

LIBRARIES = {"ours": {"split", "compile", *WEIGHTS}, "transformers": {"liger", "compile"}}
ATTENTION = ("sdpa", "flex_attention", "eager")
EXPERTS = {"grouped_mm": "grouped_mm", "batched_mm": "batched_mm", "loop": "eager"}

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """What is measured.

    Attributes:
        model: what it is called.
        config: its config.json.
        provider: as above.
        memory: for ours a level of activation memory, "auto" too, 'auto=25' within so many GiB, or
            'lean,checkpoint=4': all lean, the last 4 layers checkpoint; for the others none or checkpoint.
        batch, seq: sequences, and tokens in each; or documents, and their longest.
        data: what they are: see batches.py.
        warmup, steps: those that are not timed, and those that are.
        profile: also say what the kernels of a step are for.
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
        return "compile" in self.options

    @property
    def weights(self) -> str | None:
        """How our AdamW keeps them, if it is asked for."""
        return next((name for name in WEIGHTS if name in self.options), None)

    @property
    def state_bytes(self) -> int:
        """What the optimizer keeps of an element: torch's AdamW two moments in bfloat16."""
        return 4 if self.weights is None else state_bytes(torch.bfloat16, self.weights)

    @property
    def compiles(self) -> bool:
        """Whether something is compiled at its first step."""
        return self.ours or self.under_compile or bool(self.options & {"liger", "flex_attention"})


def check_provider(provider: str) -> None:
    """Raises ValueError."""
    library, *options = provider.split("+")
    known = LIBRARIES.get(library, set())
    if library == "transformers":
        known = known | {*ATTENTION, *EXPERTS}
    if library not in LIBRARIES or not set(options) <= known:
        raise ValueError(
            f"no provider is called {provider!r}; expected for instance ours, ours+split, transformers+liger "
            f"or transformers+sdpa+grouped_mm, of {', '.join(sorted(known or LIBRARIES))}"
        )


def measure(job: Job, device: torch.device) -> Result:
    """Times and memory, or a `note` that says why there are none.

    Raises:
        Exception: whatever a provider raises, other than that memory does not suffice or that it does not
            have the model.
    """
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    try:
        return _measure(job, device, before)
    except torch.OutOfMemoryError:
        return {"note": "out of memory"}
    except NotImplementedError as lacking:
        return {"note": in_one_line(lacking)}
    finally:
        free(device)


def compile_ahead(job: Job, device: torch.device) -> Result:
    """Run each kernel of a job's step once, with as few layers and as little memory as do, so that what
    Triton and torch.compile make lies on disk.
    """
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # as many jobs as cores run at once
    fewest = layers_of_every_kind(job.config)
    config = job.config if job.under_compile else with_layers(job.config, fewest)
    try:
        if job.memory.startswith("auto"):  # of so few layers all would be kept
            job = replace(job, memory="lean")
        model = build(job, config, device)
        model(**_batch(job, device)).loss.backward()
        if job.weights is not None:
            AdamW(model.parameters(), weights=job.weights).step()
        return {}
    finally:
        model = None
        free(device)


def _measure(job: Job, device: torch.device, before: int) -> Result:
    torch.manual_seed(0)
    cuda = device.type == "cuda"
    model = build(job, job.config, device)
    # One optimizer kernel for all; without it eight gigabytes of temporaries would be measured.
    if job.weights is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=cuda)
    else:
        optimizer = AdamW(model.parameters(), lr=1e-5, weights=job.weights)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    times, losses = time_steps(job, model, optimizer, device)
    peak = (torch.cuda.max_memory_allocated(device) - before) / 2**30 if cuda else None
    return {
        **summary(job, times),
        "peak_gib": peak,
        "planned_gib": _planned(model, job) if job.ours and job.data != IMAGES else None,
        "first_loss": losses[0].item(),
        "loss": losses[-1].item(),
        "parameters": sum(p.numel() for p in model.parameters()),
        **({"kernels": kernels(job, model, optimizer, device)} if job.profile else {}),
    }


def time_steps(
    job: Job, model: Any, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[list[float], list[torch.Tensor]]:
    """Milliseconds of each timed step, and the losses of all steps."""
    cuda = device.type == "cuda"
    losses, marks = [], [mark(cuda)]
    batch = _batch(job, device)
    for _ in range(job.warmup + job.steps):
        losses.append(_step(model, optimizer, batch))
        marks.append(mark(cuda))
    if cuda:
        torch.cuda.synchronize(device)
    return [milliseconds(a, b) for a, b in itertools.pairwise(marks)][job.warmup :], losses


def summary(job: Job, times: list[float]) -> Result:
    """The rate of one device, and the spread of its steps."""
    median = statistics.median(times)
    return {
        "tokens_per_second": 1e3 * count_tokens(job.data, job.batch, job.seq, job.config) / median,
        "step_ms": median,
        "step_ms_low": min(times),
        "step_ms_high": max(times),
    }


def _batch(job: Job, device: torch.device) -> dict[str, torch.Tensor]:
    """Pixels are in the dtype of the weights, as some encoders of transformers want them."""
    batch = make_batch(job.data, job.batch, job.seq, job.config, device)
    return {name: x.bfloat16() if name.startswith("pixel_values") else x for name, x in batch.items()}


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def kernels(job: Job, model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> Any:
    """What those of one more step are for."""
    batch = _batch(job, device)
    return by_class(lambda: _step(model, optimizer, batch), device.type == "cuda")


def _planned(model: Any, job: Job) -> float:
    """The peak that a plan of our model says, in GiB."""
    from liger_models.layers.memory.plan import Step, StepMemory

    rows, seq, longest = rows_of(job.data, job.batch, job.seq)
    labels = 1.0 if job.data == "full" else 1 - MASKED
    step = Step(rows, seq, optimizer_bytes=job.state_bytes, longest=longest, labels=labels)
    return StepMemory(model, step).plan(model.activation_memory).peak / 2**30


def build(job: Job, config: Mapping[str, Any], device: torch.device) -> Any:
    """The provider's model.

    Raises:
        NotImplementedError: it does not have one.
    """
    if job.ours:
        import liger_models

        model: Any = liger_models.from_config(
            config,
            dtype=torch.bfloat16,
            device=device,
            activation_memory=levels(job.memory, config.get("text_config", config)["num_hidden_layers"]),
            projections="split" if "split" in job.options else "fused",
        )
        if job.memory.startswith("auto"):
            gib = job.memory.partition("=")[2]
            model.set_activation_memory("auto", f"{gib}GiB" if gib else None, job.state_bytes)
    else:
        model = _transformers_model(job, config, device)
    return torch.compile(model) if job.under_compile else model


def _transformers_model(job: Job, config: Mapping[str, Any], device: torch.device) -> Any:
    import transformers

    settings = copy.deepcopy(dict(config)) | {"use_cache": False}
    if "text_config" in settings:
        settings["text_config"]["use_cache"] = False
    model_type = settings.pop("model_type")
    reference = getattr(transformers, find_architecture(model_type).reference, None)
    if reference is None:
        raise NotImplementedError(f"transformers {transformers.__version__} does not have {model_type}")
    experts = next((EXPERTS[name] for name in EXPERTS if name in job.options), None)
    if "liger" in job.options:
        _patch(model_type, with_experts=experts is None)
    hf_config = reference.config_class(**settings)
    hf_config._attn_implementation = next((name for name in ATTENTION if name in job.options), None)
    if experts is not None:
        hf_config._experts_implementation = experts
    try:
        with device:
            model = reference._from_config(hf_config, dtype=torch.bfloat16)
    except (ValueError, ImportError) as error:  # an implementation that the model does not have
        raise NotImplementedError(in_one_line(error)) from error
    if job.memory == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif job.memory != "none":
        raise ValueError(f"memory is {job.memory!r}; {job.provider} has none and checkpoint")
    return model.train()


def in_one_line(error: Exception) -> str:
    """Its first sentence, not too long."""
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return first.partition(". ")[0][:160]


def _patch(model_type: str, with_experts: bool) -> None:
    """Let liger-kernel change transformers' model, for the rest of the process's life."""
    try:
        import liger_kernel.transformers as liger
    except ImportError:
        raise NotImplementedError("liger-kernel is not installed") from None
    apply = getattr(liger, f"apply_liger_kernel_to_{model_type}", None)
    if apply is None:
        raise NotImplementedError(f"liger-kernel does not have {model_type}")
    has_choice = "swiglu" in inspect.signature(apply).parameters
    try:
        apply(**({} if with_experts or not has_choice else {"swiglu": False}))
    except ImportError as error:  # of what this transformers no longer has
        raise NotImplementedError(
            f"liger-kernel does not fit this transformers: {in_one_line(error)}"
        ) from None


def free(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def levels(memory: str, num_layers: int) -> str | list[str]:
    """'lean' for all layers, or 'lean,checkpoint=4': all lean but the last 4, which are checkpointed. What is
    chosen later begins as lean.
    """
    if memory.startswith("auto"):
        return "lean"
    if "," not in memory:
        return memory
    level, (other, count) = memory.split(",")[0], memory.split(",")[1].split("=")
    return [level] * (num_layers - int(count)) + [other] * int(count)


def mark(cuda: bool):
    """A moment of the device, or of the processor."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start, end) -> float:
    """Between two marks, the second of which was reached."""
    return start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else 1e3 * (end - start)
