"""Compare the launches of layers of experts, and of whole models, with those that `compile_ahead` compiles
before, for a Hopper GPU on a machine without one; test_compilation.py runs this. Nothing is compiled.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from benchmarks.compiled.gpus import imitate

EXPERTS, HIDDEN, INNER = 8, 128, 96


def main() -> None:
    imitate("sm_90")
    import torch
    from triton.runtime import driver

    from benchmarks.compiled.launches import NoDevice
    from liger_models.kernels import ClampedSwiGLU
    from liger_models.kernels._gpu import imagined

    driver.set_active(NoDevice("sm_90"))
    torch.cuda.device = lambda device: contextlib.nullcontext()
    for kind in ("cudnn", "flash", "mem_efficient"):  # builds for a GPU would look for one
        setattr(torch._C, f"_can_use_{kind}_attention", lambda *_: False)
    cases: dict[str, dict[str, Any]] = {
        "adapters": {"tokens": 4096, "rank": 16},
        "adapters, few rows": {"tokens": 64, "rank": 16},
        "full": {"tokens": 4096, "trained": True},
        "full, few rows": {"tokens": 64, "trained": True, "biased": True},
        "no gates": {"tokens": 256, "rank": 8, "activation": "relu2"},
        "gpt-oss": {"tokens": 1024, "rank": 8, "activation": ClampedSwiGLU(1.702, 7.0), "biased": True},
    }
    for name, case in cases.items():
        ran, ahead = launches_of(case)
        assert ran, name
        assert ran == ahead, f"{name}: {sorted(ran ^ ahead)}"
        # Once for all later calls, also of other lengths.
        ran_again, ahead = launches_of(case | {"tokens": case["tokens"] - 1})
        assert ran_again == ran, name
        assert not ahead, name
        print(name, len(ran))
    # Imagined tensors are not on a GPU.
    torch.Tensor.is_cuda = property(lambda x: imagined.get() is None)  # type: ignore[assignment,method-assign]
    for family in ("qwen3_moe", "llama"):
        ran, ahead = launches_of({"family": family}, step_of_a_model)
        assert len(ran) > 8, family
        assert ran == ahead, f"{family}: {sorted(ran ^ ahead)}"
        print(family, len(ran))
    for case in ({"rank": 8}, {"weights": "master"}):
        ran, ahead = launches_of(case, step_of_an_optimizer)
        assert len(ran) == 2, case
        assert ran == ahead, f"{case}: {sorted(ran ^ ahead)}"
    print("AdamW")


def launches_of(case: dict[str, Any], run: Callable[..., None] | None = None) -> tuple[set[str], set[str]]:
    """The launches of `step`, or of `run`, that run, and those that are compiled ahead."""
    from triton.runtime.jit import JITFunction

    found: dict[bool, set[str]] = {False: set(), True: set()}

    def take(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        varying = {p.name for p in kernel.params if p.do_not_specialize}
        names = [name for name in kernel.arg_names if name not in options]
        kinds = [described(x) for name, x in zip(names, args, strict=True) if name not in varying]
        found[warmup].add(str((kernel.fn.__name__, kinds, sorted(options.items()))))

    JITFunction.run = take
    (run or step)(**case)
    return found[False], found[True]


def described(x: Any) -> Any:
    """The arguments to which a kernel is specialised."""
    if hasattr(x, "block_shape"):
        return x.base.dtype, tuple(x.block_shape)
    if type(x) is int:
        return x == 1, x % 16 == 0
    return getattr(x, "dtype", x)


def step(
    tokens: int, rank: int = 0, activation: Any = "silu", trained: bool = False, biased: bool = False
) -> None:
    import torch

    from liger_models.kernels import moe_experts
    from liger_models.kernels.experts._expert_paths import ExpertPath

    def path(matrices: torch.Tensor) -> list[ExpertPath]:
        shapes = (EXPERTS * rank, matrices.shape[2]), (matrices.shape[1], rank * EXPERTS)
        return [ExpertPath(*(torch.empty(shape).requires_grad_() for shape in shapes), 0.5)] if rank else []

    bf16, gates = torch.bfloat16, 1 if activation == "relu2" else 2
    x, weights = torch.empty(tokens, HIDDEN, dtype=bf16), torch.empty(tokens, 2)
    first = torch.empty(EXPERTS, gates * INNER, HIDDEN, dtype=bf16)
    last = torch.empty(EXPERTS, HIDDEN, INNER, dtype=bf16)
    biases = [torch.empty(m.shape[:2], dtype=bf16) if biased else None for m in (first, last)]
    for tensor in (x, weights, *([first, last] if trained else [])):
        tensor.requires_grad_()
    paths = {"gate_up_paths": path(first), "down_paths": path(last)}
    experts = torch.empty(tokens, 2, dtype=torch.int64)
    y = moe_experts(x, weights, experts, first, last, activation, *biases, **paths)
    y.backward(torch.empty_like(y))


def step_of_a_model(family: str) -> None:
    import torch

    import liger_models
    from liger_models.architectures import find_architecture
    from liger_models.layers.sequences.sequences import Sequences

    model = liger_models.from_config(find_architecture(family).tiny, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(4, 128, dtype=torch.int64)
    sequences = Sequences.from_call((4, 128), ids.device)
    model.prepare_call(sequences, ids)
    hidden = model.run_layers(sequences, ids)
    labels = torch.empty(512, dtype=torch.int64)
    model.lm_head(hidden, labels, num_valid=508, num_items=1, form=model.logit_form).backward()


def step_of_an_optimizer(rank: int = 0, weights: str = "plain") -> None:
    import torch

    from liger_models.optim import AdamW

    dtype = torch.float32 if rank else torch.bfloat16
    parameters = [torch.empty(512, rank or 768, dtype=dtype).requires_grad_() for _ in range(3)]
    optimizer = AdamW(parameters, weights=weights)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.clip_grad_norm(1.0)
    optimizer.step()


if __name__ == "__main__":
    main()
