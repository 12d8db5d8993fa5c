"""Compile every Triton kernel for a Hopper GPU on a machine without one; test_compilation.py runs this.

Operations run on CPU tensors, and every launch is replaced by a compilation of the kernel, up to LLVM IR. The
results are meaningless: the test is that the compiler accepts each kernel with the arguments that its
operation passes. The interpreter, which runs the other tests, accepts more than the compiler does.
check_offsets.py compiles kernels for large operands up to Triton's IR, in a fraction of the time. `python -m
benchmarks devices` runs the code generators on kernels at real sizes.
"""

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import liger_models.kernels as kernels
from liger_models.kernels.attention.compressed_keys import compressed_attention, compressed_keys
from liger_models.kernels.experts._expert_float8 import float8_rows_product
from liger_models.kernels.experts._expert_order import sort_by_expert
from liger_models.kernels.experts.token_copies import copy_tokens, sum_copies
from liger_models.kernels.float8.eight_bits import gated_eight_bits, gated_from_eight_bits
from liger_models.kernels.float8.quantize import quantize_columns
from liger_models.kernels.float8.quantize import turned as transposed
from liger_models.kernels.streams.gated_streams import added_to_streams, gated_mean
from liger_models.kernels.streams.streams import mixed_streams, summed_streams, weighted_streams

BF16 = torch.bfloat16


class NoDevice:
    """The part of a Triton driver that compilation needs."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def operand(*shape, dtype=BF16):
    return torch.randn(shape, dtype=dtype).requires_grad_()


def backward(*results):
    sum(result.float().sum() for result in results).backward()


def run_everything() -> None:
    norms()
    rotary()
    backward(kernels.swiglu(operand(8, 256)))
    for approximate in ("tanh", "none"):
        backward(kernels.geglu(operand(8, 128), operand(8, 128), approximate))
    backward(kernels.clamped_swiglu(operand(8, 256)))
    backward(kernels.clamped_swiglu(operand(8, 256), plus_one=False))
    backward(kernels.capped_swiglu(operand(8, 256)))
    backward(kernels.sparse_gated(operand(8, 256), "gelu_tanh", 1.6448536))
    backward(kernels.sigmoid_gated(operand(8, 128), operand(8, 128)))
    backward(kernels.relu2(operand(8, 128)))
    backward(kernels.relu2_gated(operand(8, 256)))
    backward(kernels.embedding(torch.arange(8), operand(16, 128)))
    for one_scale in (False, True):
        kernels.quantize(operand(8, 128), by_columns=True, one_scale=one_scale)
    kernels.quantize(operand(8, 128), by_rows=False, by_columns=True, dtype=torch.float8_e5m2)
    rows, _ = kernels.quantize(operand(8, 128))
    quantize_columns(rows.values, rows.scales)
    transposed(rows)
    for activation in ("silu", "gelu_tanh", "gelu"):
        for float8 in (False, True):
            y, codes, scales = gated_eight_bits(
                operand(8, 256), activation, float8=float8, float8_gradient=float8
            )
            backward(y)
            gated_from_eight_bits(codes, scales, activation, BF16, float8=float8)
    backward(kernels.rms_norm(operand(8, 128), operand(128), float8=True))
    backward(
        *kernels.add_rms_norm(
            operand(8, 128), operand(8, 128), operand(128), float8=True, float8_gradient=True
        )
    )
    quantised()
    kernels.round_inputs(operand(8, 128))
    kernels.round_inputs(operand(2, 20_000), torch.float32)
    kernels.round_weights(operand(64, 128), (48, 16))
    backward(kernels.xielu(operand(8, 128), operand(1), operand(1), torch.tensor(0.5), torch.tensor(-1e-6)))
    backward(kernels.softmax(operand(8, 128)))
    backward(kernels.softmax(operand(2, 70_000)))
    losses()
    attention()
    streams()
    corrected = [{"score": s, "correction_bias": torch.randn(128)} for s in ("sigmoid", "sqrt_softplus")]
    of_logits = {**corrected[0], "correct_logits": True}
    for choice in ({}, {"renormalize": False}, *corrected, of_logits):
        backward(kernels.route(operand(64, 128), 8, **choice)[0])
    for choice in ({"score": "sigmoid"}, {"group_score": "max", "renormalize": False}):
        backward(kernels.route(operand(64, 128), 8, num_groups=8, top_groups=4, **choice)[0])
    chosen = torch.zeros(64, 8, dtype=torch.int32)
    backward(kernels.route(operand(64, 128), 8, experts=chosen)[0])
    router = torch.randn(64, 8).softmax(-1).topk(2)
    experts = operand(8, 2 * 128, 64), operand(8, 64, 128)
    backward(kernels.moe_experts(operand(64, 64), router.values, router.indices.int(), *experts))
    backward(
        kernels.moe_experts(operand(64, 64), router.values, router.indices.int(), *experts, weighted="inputs")
    )
    paths = {
        "gate_up_paths": [kernels.ExpertPath(operand(128, 64), operand(256, 128), 2.0)],
        "down_paths": [kernels.ExpertPath(operand(24, 128), operand(64, 24), 2.0) for _ in range(2)],
    }
    frozen = [matrices.detach() for matrices in experts]
    backward(kernels.moe_experts(operand(64, 64), router.values, router.indices.int(), *frozen, **paths))
    plain = operand(8, 128, 64), operand(8, 64, 128)
    backward(kernels.moe_experts(operand(64, 64), router.values, router.indices.int(), *plain, "relu2"))
    biases = kernels.ClampedSwiGLU(), operand(8, 2 * 128), operand(8, 64)
    backward(kernels.moe_experts(operand(64, 64), router.values, router.indices.int(), *experts, *biases))
    order = sort_by_expert(router.indices.int(), 8)
    for gather, by_rows in ((True, True), (True, False), (False, True)):
        rows = torch.randn(64 if gather else 128, 64 if by_rows else 256).bfloat16()
        float8_rows_product(rows, experts[0].detach(), order, transposed=by_rows, gather=gather)
    elsewhere = router.indices.int().masked_fill(router.indices > 4, -1)
    counted = {"num_rows": int((elsewhere >= 0).sum())}
    backward(kernels.moe_experts(operand(64, 64), router.values, elsewhere, *experts, *biases, **counted))
    own = {"own": 29, "ranks": 2, "overlaps": False, "divisor": 2, "num_rows": lambda: counted["num_rows"]}
    leaving = {"leave": lambda rows: None, "leave_weights": lambda dweights: None}
    leaving |= {"own_rows": lambda: operand(29, 64).detach(), "fill": lambda: None}
    leaving["parts"] = lambda: operand(1, 29, 64).detach()
    exchange = SimpleNamespace(**own, arrive=lambda: None, **leaving)
    many = router.values.repeat(3, 1), elsewhere.repeat(3, 1)  # in two windows
    backward(kernels.moe_experts(operand(192, 64), *many, *experts, exchange=exchange))
    for dtype in (BF16, torch.float32):
        copies = copy_tokens(operand(64, 64, dtype=dtype), elsewhere, 128)
        backward(sum_copies(copies, elsewhere))
    recurrent()
    optimizer()


def recurrent() -> None:
    documents = torch.tensor([0, 3, 16])
    for taps in (3, 4, 7):
        backward(kernels.short_conv(operand(16, 256), operand(256, taps)))
        settings = {"activation": "silu", "cu_seqlens": documents}
        backward(kernels.short_conv(operand(16, 256), operand(256, taps), operand(256), **settings))
        backward(kernels.gated_short_conv(operand(16, 768), operand(256, taps)))
    for width in (16, 128):
        settings = {"cu_seqlens": documents}
        state = operand(2, 96, width, dtype=torch.float32)
        by_token = (
            operand(16, 96),
            operand(16, 96),
            operand(96, width),
            operand(16, width),
            operand(16, width),
        )
        backward(*kernels.selective_scan(*by_token, operand(96), operand(96), **settings, state=state))
    for state in (None, operand(2, 193, dtype=torch.float32)):
        x, gates, bias = operand(16, 2, 96), operand(16, 2, 2, 96), operand(2, 2, 96)
        backward(*kernels.rg_lru(x, gates, bias, operand(192), cu_seqlens=documents, state=state))
    for tokens, key, value in ((16, 64, 64), (4100, 64, 64)):  # the latter has two segments
        settings = {"cu_seqlens": documents, "state": operand(2, 4, key, value, dtype=torch.float32)}
        gates = operand(tokens, 4), operand(tokens, 4), operand(4), operand(4)
        heads = operand(tokens, 2, key), operand(tokens, 2, key), operand(tokens, 4, value)
        backward(*kernels.gated_delta_rule(*heads, *gates, **settings))
        heads = operand(tokens, 4, key), operand(tokens, 4, key), operand(tokens, 4, value)
        decays = operand(tokens, 4, key), operand(tokens, 4), operand(4), operand(4, key)
        backward(*kernels.channel_delta_rule(*heads, *decays, lower_bound=-5.0, **settings))
        count = 1 if tokens == 16 else 4
        rows = operand(tokens, count, value), operand(tokens, count)
        rows += operand(tokens, 1, key), operand(tokens, 1, key)
        settings["state"] = operand(2, count, value, key, dtype=torch.float32)
        backward(*kernels.ssd(*rows, *(operand(count) for _ in range(3)), dt_limit=(0.01, 1.0), **settings))


def quantised() -> None:
    """Blocks of one and of both dimensions, each kind of scales and of numbers, and each option."""
    codes, table = torch.zeros(2, 64, 64, dtype=torch.uint8), torch.zeros(1, 16)
    wide, eights = {"table": table}, torch.zeros(2, 64, 128, dtype=torch.uint8)
    second, exponents = torch.ones(2), torch.zeros(2, 64, 4, dtype=torch.float8_e8m0fnu)
    groups = {"groups": torch.zeros(2, 128, dtype=torch.int32), "zero": torch.zeros(2, 64, 4)}
    for dtype in (BF16, torch.float32):
        kernels.decode_codes(codes, exponents, (64, 128), (1, 32), "low half first", dtype, **wide)
        for numbers in ("float4", "int4"):
            kernels.decode_codes(codes, exponents, (64, 128), (1, 32), numbers, dtype)
    of_second = torch.zeros(2, 64, 8, dtype=torch.float8_e4m3fn)
    for divides in (False, True):
        options = {"second": second, "divides": divides, **wide}
        kernels.decode_codes(codes, of_second, (64, 128), (1, 16), "low half first", BF16, **options)
    kernels.decode_codes(codes, exponents, (64, 128), (1, 32), "high half first", BF16, **wide, **groups)
    whole = torch.ones(2, 1, 1, dtype=BF16)
    for numbers in ("float8", "int8", "biased int8"):
        kernels.decode_codes(eights, torch.ones(2, 2, 4), (64, 128), (32, 32), numbers, BF16)
        kernels.decode_codes(eights, whole, (64, 128), (64, 128), numbers, BF16, factor=0.5)
        kernels.decode_codes(eights, torch.ones(2, 64, 4), (64, 128), (1, 32), numbers, BF16, **groups)


def norms() -> None:
    for width in (256, 40_000):
        x, weight, bias = operand(8, width), operand(width), operand(width)
        for cast in ("llama", "gemma"):
            backward(kernels.rms_norm(x, weight, cast=cast))
            backward(*kernels.add_rms_norm(x, operand(8, width), weight, cast=cast))
        backward(kernels.rms_norm(x, None))
        backward(kernels.layer_norm(x, weight, bias))
        backward(*kernels.add_layer_norm(x, operand(8, width), weight, bias))
    for group, gate_first, activation, cast in (
        (128, False, "silu", "llama"),
        (128, False, "sigmoid", "float32"),
        (4096, True, "silu", "llama"),
        (8192, True, "silu", "llama"),
    ):
        x, gate, weight = operand(8, 8192), operand(8, 8192), operand(group)
        options = {"group_size": group, "gate_first": gate_first, "activation": activation, "cast": cast}
        backward(kernels.gated_rms_norm(x, gate, weight, **options))


def rotary() -> None:
    heads, kv_heads, dim = 8, 2, 64
    for interleaved in (False, True):
        for turned in (dim, dim // 2):
            tables = torch.rand(16, turned // 2), torch.rand(16, turned // 2)
            qkv = operand(16, (heads + 2 * kv_heads) * dim)
            backward(*kernels.split_rotary_qkv(qkv, *tables, heads, kv_heads, dim, interleaved))
            separate = operand(16, heads, dim), operand(16, kv_heads, dim)
            backward(*kernels.rotary(*separate, *tables, interleaved))
            for per_head in (True, False):
                widths = (dim, dim) if per_head else (heads * dim, kv_heads * dim)
                options = {"eps": 1e-6, "per_head": per_head, "interleaved": interleaved}
                weights = [operand(width) for width in widths]
                shape = (heads, kv_heads, dim)
                # Half of all combinations, which cover every combination of any three of these four options.
                options["norm_first"] = interleaved ^ (turned == dim) ^ per_head
                backward(*kernels.split_norm_rotary_qkv(qkv, *weights, *tables, *shape, **options))


def attention() -> None:
    everything = {"cu_seqlens": torch.tensor([0, 3, 16]), "window": 5, "softcap": 30.0, "sinks": operand(4)}
    cases = [(64, BF16, {}), (128, BF16, everything), (256, torch.float16, everything)]
    backward(kernels.attention(*(operand(16, 4, dim) for dim in (192, 192, 128)), **everything))
    tree = kernels.tree_ranges([0, 8, 12, 16], [-1, 0, 0], torch.device("cpu"), window=9)
    for marked in (None, torch.ones(16, dtype=torch.int32)):
        backward(
            kernels.attention(*(operand(16, 4, 64) for _ in range(3)), bounds=tree._replace(marked=marked))
        )
    sloped = {**everything, "slopes": torch.ones(4)}
    for dim, dtype, options in [*cases, (128, BF16, sloped), (96, torch.float32, sloped)]:
        backward(kernels.attention(*(operand(16, heads, dim, dtype=dtype) for heads in (4, 2, 2)), **options))

    bounds = kernels.document_bounds(everything["cu_seqlens"], 16)
    for dim, dtype in ((128, BF16), (64, torch.float32)):
        indexer = operand(16, 4, dim, dtype=dtype), operand(16, dim, dtype=dtype), torch.ones(16, 4)
        for longest in (16, 40_000):  # scores in registers, and by blocks
            kernels.choose_keys(*indexer, 4, scale=1.0, longest=longest, bounds=bounds)
    chosen = kernels.choose_keys(*indexer, 4, scale=1.0, longest=16)
    backward(kernels.attention(*(operand(16, heads, 64) for heads in (4, 2, 2)), chosen=chosen))
    for dtype in (BF16, torch.float32):
        indexer = operand(16, 2, 64, dtype=dtype), operand(16, 64, dtype=dtype)
        blocks = kernels.choose_blocks(*indexer, 2, size=4, local=1, longest=16, bounds=bounds)
    backward(kernels.attention(*(operand(16, heads, 64) for heads in (4, 2, 2)), chosen=blocks))

    places = compressed_keys((0, 3, 16), 4, torch.device("cpu"))
    for number in (None, torch.zeros(16, 2, dtype=torch.int32)):
        operands = operand(16, 16, 512), operand(16, 512), operand(len(places.first), 512), operand(16)
        backward(compressed_attention(*operands, places, scale=1.0, window=5, chosen=number))


def streams() -> None:
    x, fn, base, scale = (operand(*shape) for shape in ((8, 512), (24, 512), (24,), (3,)))
    options = {"count": 4, "iterations": 2, "eps": 1e-2, "norm_eps": 1e-3}
    summed, *mixing = weighted_streams(x, fn, base, scale, **options)
    backward(mixed_streams(x, summed, *mixing))
    weights, mixture = operand(8, 4), operand(8, 4, 4)
    backward(mixed_streams(x, operand(8, 128), weights, mixture, operand(8, 128)), summed_streams(x, weights))
    apart = weighted_streams(x, operand(8, 512), operand(8), operand(2), **options)
    backward(mixed_streams(x, *apart))
    backward(*weighted_streams(x, operand(4, 512), operand(4), operand(1), **options))
    backward(added_to_streams(x, gated_mean(operand(8, 512), x, 4), operand(8, 4)))


def optimizer() -> None:
    residues = {"compensated": torch.zeros(64, dtype=BF16), "master": torch.zeros(64, dtype=torch.int16)}
    for i, weights in enumerate(("stochastic", "compensated", "master", "plain")):
        for dtype, residue in ((BF16, residues.get(weights)), (torch.float32, None)):
            # Half of all combinations, which cover every combination of any two of the three options.
            moments = torch.zeros(2, 64, dtype=(BF16, torch.float32)[(i + (dtype == BF16)) % 2])
            settings = kernels.AdamWSettings(1e-3, 0.9, 0.95, 1e-8, 0.1, weights, 0)
            tensors = torch.zeros(64, dtype=dtype), torch.zeros(64), *moments, torch.ones(()), residue
            scalars = (torch.ones(()), torch.zeros(())) if weights == "plain" else ()
            kernels.adamw([kernels.AdamWTensors(*tensors, 0)], settings, *scalars)
    kernels.sum_of_squares([torch.zeros(64, dtype=BF16), torch.zeros(64), torch.zeros(65)])


def losses() -> None:
    labels, vocab = torch.tensor([3, -100, 7, 9]), 1000
    options = [{}, {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "logit_scale": 0.5}]
    for choice in options:
        backward(kernels.cross_entropy(operand(4, vocab), labels, **choice))
        loss = kernels.linear_cross_entropy(operand(4, 64), operand(vocab, 64), labels, **choice)
        backward(2 * loss)
        asked = {"return_z_loss": True, "return_predicted_tokens": True}
        output = kernels.linear_cross_entropy(operand(4, 64), operand(vocab, 64), labels, **choice, **asked)
        backward(output.loss, output.z_loss)
    for caps in ({}, {"softcap": 30.0, "teacher_softcap": 30.0}):
        for divergence in (kernels.kl_div, kernels.generalized_jsd, kernels.total_variation):
            teacher = torch.randn(4, vocab, dtype=BF16)
            backward(divergence(operand(4, vocab), teacher, labels=labels, **caps))
        for divergence in (kernels.linear_kl, kernels.linear_jsd, kernels.linear_cosine_distillation):
            layer = torch.randn(4, 32, dtype=BF16), torch.randn(vocab, 32, dtype=BF16)
            backward(divergence(operand(4, 64), operand(vocab, 64), *layer, labels=labels, **caps))
    for choice in ({}, {"temperature": 2.0, "softcap": 30.0}, {"temperature": torch.full((4,), 2.0)}):
        wanted = {"entropy": True, "top1": True, "log_sum_sq_probs": True, **choice}
        backward(*kernels.log_probs(operand(4, vocab), labels, **wanted)[:2])
        operands = operand(4, 64), operand(vocab, 64), labels
        backward(*kernels.linear_log_probs(*operands, **wanted)[:2])
        backward(kernels.linear_log_probs(*operands, coefficients=torch.ones(4), **choice).weighted_sum)


def instead_of_launching(take: Callable[[JITFunction, dict, Any], None]) -> list[ModuleType]:
    """Compile every launch on CPU tensors for sm_90 from now on; return the modules that define kernels.

    `take` is called with the kernel, the keyword arguments of its launch and the compiled kernel.
    """
    modules = modules_of_kernels()
    launch = JITFunction.run

    def compile_only(self, *args, **kwargs):
        compiled = launch(self, *args, **{**kwargs, "warmup": True})
        take(self, kwargs, compiled)
        return compiled

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(NoDevice())
    for module in modules:
        if hasattr(module, "use_triton"):
            module.use_triton = lambda *tensors: not torch.compiler.is_compiling()
        if hasattr(module, "early_start"):
            module.early_start = lambda x: {"EARLY_START": True, "launch_pdl": True}
    torch.manual_seed(0)
    return modules


def modules_of_kernels() -> list[ModuleType]:
    names = [module.name for module in pkgutil.walk_packages(kernels.__path__, "liger_models.kernels.")]
    return [importlib.import_module(name) for name in names]


def kernels_of(modules: list[ModuleType]) -> dict[str, JITFunction]:
    """The kernels that these modules define, by name."""
    return {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
        and name.endswith("_kernel")
        and value.fn.__module__ == module.__name__
    }


def without_code(last: str) -> Callable[..., tuple[str, str] | None]:
    """Hook for Triton that replaces the stages of a compilation after the `last`: "ttir" or "llir"."""

    def name_only(source: Any, metadata: dict) -> str:
        metadata["name"] = "kernel"
        return ""

    def hook(*call: Any) -> tuple[str, str] | None:
        if not call:  # what keeps these compilations apart from full ones in the cache
            return f"up_to_{last}", f"up_to_{last}"
        _, stages, *_ = call
        if last == "ttir":
            stages["ttgir"] = lambda source, metadata: source
            stages["llir"] = lambda source, metadata: metadata.update(shared=0, tmem_size=0) or ""
        stages["ptx"] = name_only
        stages["cubin"] = lambda source, metadata: b""
        return None

    return hook


def main() -> None:
    compiled: set[str] = set()
    triton.knobs.runtime.add_stages_inspection_hook = without_code("llir")

    def note(kernel: JITFunction, kwargs: dict, _: Any) -> None:
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        assert "enable_fp_fusion" in kwargs, f"{name} leaves the fusion of products and sums to Triton"
        compiled.add(name)

    found = kernels_of(instead_of_launching(note))
    run_everything()
    missed = sorted(found.keys() - compiled)
    assert not missed, f"no operation above launches {missed}"
    print(f"compiled {len(compiled)} kernels")


if __name__ == "__main__":
    main()
