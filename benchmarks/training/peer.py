"""Peers of a training step: transformers' model, and the step's time.

Imports nothing of ours: `alone.py` runs the same code in a separate process.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import itertools
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

ATTENTION = ("sdpa", "flex_attention", "eager", "varlen")
EXPERTS = {"grouped_mm": "grouped_mm", "batched_mm": "batched_mm", "loop": "eager", "sonicmoe": "sonicmoe"}
FLOAT8 = ("rowwise", "tensorwise", "rowwise_with_gw_hp")  # of torchao
# Packages whose kernels transformers' recurrent layers use if installed, with patterns of the kernels' names.
PACKAGES = {
    "fla": r"gated_delta_rule",
    "mamba_ssm": r"_chunk_scan_|selective_scan",
    "causal_conv1d": r"causal_conv1d",
}
LONG_STEP, FEW_STEPS = 200.0, 3  # milliseconds: the median of so many long steps is within half a percent
OPTIONS = {"liger", "compile", "regional", "kernels", *ATTENTION, *EXPERTS, *FLOAT8, *PACKAGES}


def build_peer(
    config: Mapping[str, Any], reference: str, options: Set[str], memory: str, device: torch.device
) -> Any:
    """The transformers class `reference` with random weights in bfloat16.

    Args:
        config: its config.json.
        reference: the class.
        options: as in a provider's name (`step.py`).
        memory: none or checkpoint.
        device: its device.

    Raises:
        NotImplementedError: this version of transformers, or liger-kernel, does not support it.
    """
    import transformers

    settings = copy.deepcopy(dict(config)) | {"use_cache": False}
    if "text_config" in settings:
        settings["text_config"]["use_cache"] = False
    model_type = settings.pop("model_type")
    if lacks := lacking(model_type, reference, options):
        raise NotImplementedError(lacks)
    found = getattr(transformers, reference)
    experts = next((EXPERTS[name] for name in EXPERTS if name in options), None)
    if "liger" in options:
        _patch(model_type, with_experts=experts is None)
    if "varlen" in options:
        _register_varlen()
    hf_config = _config_class(model_type, reference)(**settings)
    hf_config._attn_implementation = next((name for name in ATTENTION if name in options), None)
    if experts is not None:
        hf_config.get_text_config()._experts_implementation = experts  # an encoder may have no choice
    try:
        with device:
            model = found._from_config(hf_config, dtype=torch.bfloat16)
        _keep_in_float32(model)
        _round_weights(model, settings.get("quantization_config") or {})
        if "kernels" in options:  # from the hub, replacing the model's own layers
            model.train().set_use_kernels(True)
    except (ValueError, ImportError) as error:  # an implementation that the model does not support
        raise NotImplementedError(in_one_line(error)) from error
    if memory == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif memory != "none":
        raise ValueError(
            f"memory is {memory!r}; {'+'.join(['transformers', *sorted(options)])} has none and checkpoint"
        )
    model.train()
    recipe = next((name for name in FLOAT8 if name in options), None)
    if recipe is not None:
        use_torchao(model, recipe)
    if "regional" in options:
        for path, layers in model.named_modules():
            if isinstance(layers, torch.nn.ModuleList) and path.rpartition(".")[2] == "layers":
                for layer in layers:
                    layer.compile()  # one compilation serves all
    return torch.compile(model) if "compile" in options else model


def _keep_in_float32(model: Any) -> None:
    """Give tensors that transformers loads in float32 in any case that dtype, as in a loaded model."""
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    kept = re.compile("|".join(rf"(^|\.){name}(\.|$)" for name in names) or "(?!)")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if kept.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _round_weights(model: Any, asked: Mapping[str, Any]) -> None:
    """Give the model transformers' linear layers that round to three values in each step, if a checkpoint of
    BitNet asks for them, as in a loaded model.
    """
    if asked.get("quant_method") != "bitnet" or asked.get("quantization_mode") != "online":
        return
    from transformers.integrations.bitnet import AutoBitLinear

    linear = [(path, layer) for path, layer in model.named_modules() if type(layer) is torch.nn.Linear]
    for path, layer in linear:
        if layer is not model.get_output_embeddings():
            sizes = layer.in_features, layer.out_features, layer.bias is not None
            rounded = AutoBitLinear(*sizes, device="meta", online_quant=True)
            rounded.weight, rounded.bias = layer.weight, layer.bias
            model.set_submodule(path, rounded)


def lacking(model_type: str, reference: str, options: Set[str]) -> str | None:
    """Missing support or package of a peer for a model, from its imports alone: nothing is built or run."""
    import transformers

    if not hasattr(transformers, reference) or _config_class(model_type, reference) is None:
        return f"transformers {transformers.__version__} does not have {model_type}"
    for package in sorted(options & PACKAGES.keys()):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if "liger" not in options:
        return None
    try:
        import liger_kernel.transformers as liger
    except ImportError:
        return "liger-kernel is not installed"
    has = hasattr(liger, f"apply_liger_kernel_to_{model_type}")
    return None if has else f"liger-kernel does not have {model_type}"


def _config_class(model_type: str, reference: str) -> Any:
    """The class that reads a config of this type for the model class `reference`, which may be another
    family's (EXAONE 3 runs as LLaMA); None if transformers does not have the type.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = getattr(transformers, reference).config_class
    if own.model_type == model_type:
        return own
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if names.get(model_type) == reference:
        return CONFIG_MAPPING[model_type]
    return own if model_type in CONFIG_MAPPING else None


def use_torchao(model: torch.nn.Module, recipe: str, emulate: bool = False) -> None:
    """Replace linear layers by torchao's in float8: those whose widths allow it, but not the head. `emulate`
    computes their products in float32, for CPUs.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise NotImplementedError("torchao is not installed") from None

    def chosen(module: torch.nn.Module, name: str) -> bool:
        sizes = getattr(module, "in_features", 1), getattr(module, "out_features", 1)
        return not (name.endswith("lm_head") or any(size % 16 for size in sizes))

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=chosen)


def _patch(model_type: str, with_experts: bool) -> None:
    """Patch transformers' model with liger-kernel, for the rest of the process's life."""
    import liger_kernel.transformers as liger

    apply = getattr(liger, f"apply_liger_kernel_to_{model_type}")
    has_choice = "swiglu" in inspect.signature(apply).parameters
    try:
        apply(**({} if with_experts or not has_choice else {"swiglu": False}))
    except ImportError as error:  # imports that this transformers no longer has
        raise NotImplementedError(
            f"liger-kernel does not fit this transformers: {in_one_line(error)}"
        ) from None


def document_bounds(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Document boundaries in one row, and the longest, in the form that transformers passes to
    FlashAttention."""
    places = batch["position_ids"][0] == 0
    starts = places.nonzero()[:, 0].int()
    cu = torch.cat([starts, starts.new_tensor([len(places)])])
    longest = int(cu.diff().max())
    return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}


def _register_varlen() -> None:
    """Make transformers run packed documents without padding on torch's own FlashAttention 2."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    gqa: dict[str, Any] = (
        {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    )

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [T, heads, dim]
        bounds = (
            kwargs["cu_seq_lens_q"],
            kwargs["cu_seq_lens_k"],
            kwargs["max_length_q"],
            kwargs["max_length_k"],
        )
        out = varlen_attn(q, k, v, *bounds, scale=scaling, window_size=(-1, 0), **gqa)
        return out.unflatten(0, (query.shape[0], -1)), None

    AttentionInterface.register("varlen", attend)
    AttentionMaskInterface.register("varlen", flash_attention_mask)


def tune_briefly(once: bool = False) -> None:
    """Make packages time each setting of their kernels for 12 ms, or only run it once, in this process:
    hundreds of settings take a minute at Triton's 125 ms.
    """
    import triton.testing

    def run_once(function: Callable[[], object], quantiles: Sequence[float] = (), **others: Any) -> Any:
        function()
        return [1.0] * len(quantiles) if quantiles else 1.0

    brief = functools.partial(triton.testing.do_bench, warmup=2, rep=10)
    triton.testing.do_bench = run_once if once else brief


def check_packages(options: Set[str], step: Callable[[], object]) -> list[str]:
    """The names of the kernels by which a step on a GPU shows that it uses the packages among the options.

    Without a package, or if its import fails, transformers silently uses its own slow form.

    Raises:
        NotImplementedError: no kernel of a package ran.
    """
    asked = sorted(options & PACKAGES.keys())
    if not asked:
        return []
    kernels = set()
    if torch.cuda.is_available():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        kernels = {event.name for event in profile.events()}
    found = {one: sorted(name for name in kernels if re.search(PACKAGES[one], name)) for one in asked}
    if missing := [package for package in asked if not found[package]]:
        raise NotImplementedError(f"transformers did not use the kernels of {' and '.join(missing)}")
    return [name for names in found.values() for name in names]


def in_one_line(error: Exception) -> str:
    """First sentence of the error, shortened."""
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return first.partition(". ")[0][:160]


def measure_alone(asked: Mapping[str, Any]) -> dict[str, float]:
    """The times of a step, for `alone.py`."""
    device = asked["device"]
    model = build_peer(asked["config"], asked["reference"], set(asked["options"]), asked["memory"], device)
    optimizer = fused_adamw(model, device)
    batch = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in asked["batch"].items()}
    times, _ = time_steps(model, optimizer, batch, asked["warmup"], asked["steps"], device)
    return summary(times, asked["tokens"])


def fused_adamw(model: Any, device: torch.device) -> torch.optim.Optimizer:
    """torch's fused AdamW: the unfused one would add eight gigabytes of temporaries to the measurement."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, batch: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def time_steps(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, torch.Tensor],
    warmup: int,
    steps: int,
    device: torch.device,
    turn: Callable[[], None] | None = None,
) -> tuple[list[float], list[torch.Tensor]]:
    """Milliseconds of each timed step, and the losses of all steps. `turn` is called before the last untimed
    step: others wait from then on, so that steps of more than `LONG_STEP` are timed `FEW_STEPS` times.
    """
    cuda = device.type == "cuda"
    losses, marks = [], [mark(cuda)]
    for step in itertools.count():
        if step == warmup + steps:
            break
        if turn is not None and step == max(0, warmup - 1):
            turn()
            marks[-1] = mark(cuda)
        losses.append(train_step(model, optimizer, batch))
        marks.append(mark(cuda))
        if turn is not None and step == warmup - 1:
            if cuda:
                torch.cuda.synchronize(device)
            if milliseconds(*marks[-2:]) > LONG_STEP:
                steps = min(steps, FEW_STEPS)
    if cuda:
        torch.cuda.synchronize(device)
    return [milliseconds(a, b) for a, b in itertools.pairwise(marks)][warmup:], losses


def summary(times: list[float], tokens: int) -> dict[str, float]:
    """Throughput of one device, and the spread of its steps."""
    median = statistics.median(times)
    return {
        "tokens_per_second": 1e3 * tokens / median,
        "step_ms": median,
        "step_ms_low": min(times),
        "step_ms_high": max(times),
    }


def mark(cuda: bool):
    """Record a time on the device, or of the process."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start, end) -> float:
    """Time between two marks; the second must have completed."""
    return start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else 1e3 * (end - start)
