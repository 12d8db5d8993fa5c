"""A step with LoRA over the bits of a quantised checkpoint, against the same step on the decoded base.

A gpt-oss checkpoint of random MXFP4 weights is written and read again: reading its bytes, loading the model
in its bits, and loading it dense. Then the step's time and peak memory, and the time to decode a layer's
experts in each format against a copy that moves as many bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import liger_models
from benchmarks.kept_fits import cap, fitting, row, wait
from benchmarks.report import machine, markdown_table, publish
from benchmarks.training.shapes import MODELS, config_of
from liger_models.convert.checkpoints.expressions import Ref
from liger_models.kernels import decode_codes

SUMMARY = "a LoRA step over the bits of a quantised checkpoint against the decoded base; loading; decoding"
LONGEST = 1 << 22  # tokens of a row that `--seq max` may find
HEADER = ("what", "seconds", "GiB", "note")
QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        choices=[name for name in MODELS if "gpt-oss" in name or "a3b" in name or name == "llama-3-8b"],
        default="gpt-oss-20b",
    )
    parser.add_argument("--batch", type=int, default=1, help="(%(default)s)")
    parser.add_argument(
        "--seq",
        type=_length,
        default=4096,
        help="in `fits` also `max`: as the plan has for 0.95 of the cap (%(default)s)",
    )
    parser.add_argument("--steps", type=int, default=6, help="timed steps (%(default)s)")
    parser.add_argument("--levels", nargs="+", default=["lean", "checkpoint"], help="activation memory")
    parser.add_argument(
        "--cap", type=float, help="GiB that torch may allocate for steps in the bits at the first level"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["decode", "load", "bits", "dense"],
        help="fits: steps under the cap over random bits, without a checkpoint, and the plan",
    )
    parser.add_argument(
        "--bases", nargs="+", choices=["bits", "dense"], default=["bits"], help="of `fits` (%(default)s)"
    )
    parser.add_argument(
        "--form", choices=["nf4", "fp8"], default="nf4", help="of the bits of `fits`, but of gpt-oss's"
    )
    parser.add_argument("--rank", type=int, default=16, help="of the adapters of `fits` (%(default)s)")
    parser.add_argument("--experts", action="store_true", help="in `fits`, adapters on experts, too")
    parser.add_argument("--optimizer-memory", choices=["device", "host"], default="device", help="of `fits`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", help="where the checkpoint is written, and removed again")


def _length(text: str) -> int:
    return 0 if text == "max" else int(text)


def run(args: argparse.Namespace) -> int:
    device, rows = torch.device(args.device), []
    for found in measure(args, device):
        rows.append(found)
        print(json.dumps(found), flush=True)
        table = [[r["what"], f"{r['seconds']:.4f}", f"{r['GiB']:.2f}", r["note"]] for r in rows]
        text = f"{machine(device, 'peft')}. {args.model}.\n\n{markdown_table(HEADER, table)}"
        publish(args.out, f"kept-{args.model}{'-fp8' if args.form == 'fp8' else ''}", text, rows, show=False)
    return 0


def measure(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    config = MODELS[args.model]
    if "decode" in args.parts:
        yield from decoding(config, device)
    if "fits" in args.parts:
        yield from fitting(config_of(args.model, seq=args.seq or LONGEST), args, device)
    if not {"load", "bits", "dense"} & {*args.parts}:
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder, began = Path(name), time.perf_counter()
        write_checkpoint(config, folder, device)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**30
        yield row("writing the checkpoint", time.perf_counter() - began, size)
        if "load" in args.parts:
            for state in ("on the disk", "in the page cache"):
                for what, action in loading(folder, device):
                    if state == "on the disk":
                        forget(folder)
                    yield row(f"{what}, files {state}", timed(action, device), size)
        for base in ("bits", "dense"):
            if base in args.parts:
                yield from stepping(folder, args, device, base == "bits")
                free(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def timed(action: Callable[[], object], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    made = action()
    wait(device)
    seconds = time.perf_counter() - began
    del made
    free(device)
    return seconds


def write_checkpoint(config: dict[str, Any], folder: Path, device: torch.device) -> None:
    """Write random weights in files of a layer each."""
    dense = {key: value for key, value in config.items() if key != "quantization_config"}
    dense["dtype"] = "bfloat16"
    model = liger_models.from_config(dense, device="meta")
    (folder / "config.json").write_text(json.dumps({**dense, "quantization_config": QUANTISED}))
    files: dict[str, dict[str, Tensor]] = {}
    for native, expr in model.weight_map().items():
        for ref in expr.refs():
            file = ".".join(ref.name.split(".")[:3]) if native.startswith("layers.") else ref.name
            files.setdefault(f"{file}.safetensors", {}).update(random_parts(native, ref, device))
    placed = {}
    with ThreadPoolExecutor(4) as pool:
        pending = []
        for file, tensors in files.items():
            placed |= dict.fromkeys(tensors, file)
            pending.append(pool.submit(write_file, folder / file, tensors))
        for done in pending:
            done.result()
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_file(path: Path, tensors: dict[str, Callable[[], Tensor]]) -> None:
    save_file({name: make().cpu() for name, make in tensors.items()}, path, metadata={"format": "pt"})


def random_parts(native: str, ref: Ref, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    if native.endswith(("experts.gate_up_proj", "experts.down_proj")):
        experts, inputs, outputs = ref.shape
        grid = experts, outputs, inputs // 32
        return {
            f"{ref.name}_blocks": lambda: torch.randint(256, (*grid, 16), dtype=torch.uint8, device=device),
            f"{ref.name}_scales": lambda: torch.randint(117, 122, grid, dtype=torch.uint8, device=device),
        }
    if native.endswith("norm.weight"):
        return {ref.name: lambda: torch.ones(ref.shape, dtype=torch.bfloat16)}
    return {ref.name: lambda: torch.randn(ref.shape, device=device).mul_(0.02).bfloat16()}


def forget(folder: Path) -> None:
    """Ask the system to drop the files from memory."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def loading(folder: Path, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "reading the bytes", lambda: read_bytes(folder)
    yield "loading in the bits", lambda: load(folder, device, True)
    yield "loading dense", lambda: load(folder, device, False)


def read_bytes(folder: Path) -> None:
    """Read the files in the reader's number of threads, and nothing else."""

    def read(path: Path) -> None:
        memory = bytearray(2**24)
        with path.open("rb", buffering=0) as file:
            while file.readinto(memory):
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, folder.glob("*.safetensors")))


def load(folder: Path, device: torch.device, keep: bool, **options: Any) -> Any:
    return liger_models.from_hub(folder, device=device, projections="split", keep_quantised=keep, **options)


def stepping(
    folder: Path, args: argparse.Namespace, device: torch.device, keep: bool
) -> Iterator[dict[str, Any]]:
    """Time steps of the model at each level."""
    import peft

    if keep:
        cap(args, device)
    base = "in the bits" if keep else "dense"
    model = load(folder, device, keep)
    vocabulary = model.spec.vocab_size
    held = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    ids = torch.randint(vocabulary, (args.batch, args.seq), device=device)

    def step() -> Tensor:
        loss: Tensor = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    yield row(f"weights {base}", 0.0, held)
    for level in args.levels:
        model.set_activation_memory(level)
        try:
            loss = step()
            step()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = sorted(timed_step(step, device) for _ in range(args.steps))
        except torch.OutOfMemoryError as error:
            yield row(f"a step {base}, {level}", 0.0, 0.0, str(error).splitlines()[0][:200])
            optimizer.zero_grad(set_to_none=True)
            free(device)
            continue
        finally:
            if device.type == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0)
        peak, most = peaks(device)
        median = seconds[len(seconds) // 2]
        note = f"{args.batch * args.seq / median:.0f} tokens/s, first loss {loss.item():.6f}, "
        yield row(f"a step {base}, {level}", median, peak, f"{note}reserved {most:.2f} GiB")


def peaks(device: torch.device) -> tuple[float, float]:
    """GiB allocated, and reserved by the allocator, at the most."""
    if device.type != "cuda":
        return 0.0, 0.0
    return torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30


def timed_step(step: Callable[[], object], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - began


def decoding(config: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Time the decoding of a layer's first matrices in several formats."""
    spec = liger_models.from_config(config, device="meta").spec
    mixture = next(block.mlp for block in spec.blocks if hasattr(block.mlp, "num_experts"))
    count, shape = mixture.num_experts, (2 * mixture.intermediate_size, spec.hidden_size)
    rows, columns = shape

    def bytes_of(*sizes: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, (count, *sizes), dtype=torch.uint8, device=device)

    halves, groups = bytes_of(rows, columns // 2), columns // 32
    exponents = bytes_of(rows, groups, low=117, high=122).view(torch.float8_e8m0fnu)
    blocks = torch.rand(count, -(-rows // 128), -(-columns // 128), device=device)
    bf16 = torch.bfloat16
    cases: dict[str, tuple[Callable[[], Tensor], int]] = {
        "mxfp4": (
            lambda: decode_codes(halves, exponents, shape, (1, 32), "float4", bf16),
            halves.nbytes + exponents.nbytes,
        ),
    }
    if count * rows * columns < 2**30:
        eights, floats = bytes_of(rows, columns, high=126), bytes_of(rows, columns // 16, high=126)
        second, of_nf4 = (
            torch.rand(count, device=device),
            torch.rand(count, rows, columns // 64, device=device),
        )
        tables, scale = (
            torch.rand(count, 16, device=device),
            torch.rand(count, rows, groups, device=device).bfloat16(),
        )
        cases |= {
            "float8 blocks": (
                lambda: decode_codes(eights, blocks, shape, (128, 128), "float8", bf16),
                eights.nbytes + blocks.nbytes,
            ),
            "nvfp4": (
                lambda: decode_codes(
                    halves,
                    floats.view(torch.float8_e4m3fn),
                    shape,
                    (1, 16),
                    "float4",
                    bf16,
                    second=second,
                    divides=True,
                ),
                halves.nbytes + floats.nbytes,
            ),
            "nf4": (
                lambda: decode_codes(halves, of_nf4, shape, (1, 64), "high half first", bf16, table=tables),
                halves.nbytes + of_nf4.nbytes,
            ),
            "int4, groups of 32": (
                lambda: decode_codes(halves, scale, shape, (1, 32), "int4", bf16),
                halves.nbytes + scale.nbytes,
            ),
        }
    for name, (decode, read) in cases.items():
        yield against_a_copy(name, decode, read, device)


def against_a_copy(
    name: str, decode: Callable[[], Tensor], read: int, device: torch.device
) -> dict[str, Any]:
    moved = (read + decode().nbytes) // 2
    copy = torch.empty(moved, dtype=torch.uint8, device=device)
    into = torch.empty_like(copy)
    decoded, copied = best(decode, device), best(lambda: into.copy_(copy), device)
    return row(f"decoding {name}", decoded, 2 * moved / 2**30, f"{decoded / copied:.2f} of a copy's time")


def best(action: Callable[[], object], device: torch.device) -> float:
    for _ in range(2):
        action()
    return min(timed_step(action, device) for _ in range(5))
