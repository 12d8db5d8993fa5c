"""`liger-models inspect`: show a model's layers, parameters, checkpoint tensors and memory requirements.

Reads config.json and the headers of the weight files; for hub repositories, no weights are downloaded.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_models.cli.shared.arguments import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from liger_models.convert.checkpoints.expressions import Expr
    from liger_models.convert.checkpoints.safetensors_header import TensorInfo
    from liger_models.convert.quantised.recognition import Quantisation
    from liger_models.models.causal_lm import LigerCausalLM


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "inspect", help="show a model's layers, parameters and memory", description=__doc__
    )
    parser.add_argument("name", metavar="MODEL", help=f"{MODEL}; or a preset (see `list`)")
    parser.add_argument(
        "--mtp", action="store_true", help="with the checkpoint's modules for multi-token prediction"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> None:
    report = inspect(args.name, args.mtp)
    if args.json:
        import json

        print(json.dumps(report, indent=2))
    else:
        print_report(report)


def inspect(name: str, mtp: bool = False) -> dict[str, Any]:
    """Everything the command shows, as JSON-serialisable data, parameter by parameter and layer by layer.
    `mtp`: with the modules for multi-token prediction.
    """
    from dataclasses import asdict

    import liger_models

    config, headers, folder = find_config(name)
    preset = not headers and folder is None  # `init` creates it in bfloat16
    dtype = "bfloat16" if preset else "auto"
    model = liger_models.from_config(config, device="meta", dtype=dtype, dropout=0.0, mtp=mtp)
    stored: Mapping[str, TensorInfo] = {}
    quantisation = None
    if folder is not None:
        stored, quantisation = checked_tensors(folder, model)
    elif headers:
        stored, quantisation = remote_tensors(name, config, headers, model)
    parameters = _parameters(model, stored)
    report: dict[str, Any] = {
        "name": name,
        "architecture": model.architecture.model_type,
        "reference": model.architecture.reference,
        "num_parameters": model.num_parameters(),
        "spec": asdict(model.spec),
        "parameters": parameters,
        "copied": sorted(stored.keys() - {name for row in parameters for name in row["from"]}),
        "quantisation": None if quantisation is None else _quantisation(quantisation, stored),
        "memory": _memory(model, stored),
        "float8": _float8(model),
    }
    if quantisation is not None:  # last, since it changes the model
        report["quantisation"]["bytes kept"] = _kept_bytes(model, stored, folder or Path(name))
    return report


def find_config(name: str) -> tuple[Any, dict[str, tuple[str, tuple[int, ...]]], Path | None]:
    """The config, the dtypes and shapes of the checkpoint's tensors if the hub lists them, and the folder if
    any.
    """
    from liger_models.cli.shared.checkpoints import find_checkpoint
    from liger_models.convert.checkpoints.adapter import resolve_model
    from liger_models.convert.checkpoints.hub import read_headers, resolve
    from liger_models.convert.errors import HubError
    from liger_models.presets import PRESETS, naming_presets

    if Path(name).exists():
        folder, _ = resolve_model(find_checkpoint(name))  # of an adapter, the base model
        return folder, {}, folder
    if name in PRESETS:
        return PRESETS[name], {}, None
    try:
        folder = resolve(name, local_files_only=True)
    except HubError:  # not in the cache: read the headers remotely
        with naming_presets(name):
            return *read_headers(name), None
    return folder, {}, folder


def checked_tensors(
    folder: Path, model: "LigerCausalLM"
) -> "tuple[Mapping[str, TensorInfo], Quantisation | None]":
    """The checkpoint's tensors in dense form, after checking that the files match the model."""
    from liger_models.convert.quantised.reader import ModelReader
    from liger_models.models.matching import find_layout

    with ModelReader(folder) as reader:
        find_layout(model, reader)
        return reader.tensors, reader.quantisation


def remote_tensors(
    name: str,
    config: dict[str, Any],
    headers: dict[str, tuple[str, tuple[int, ...]]],
    model: "LigerCausalLM",
) -> "tuple[Mapping[str, TensorInfo], Quantisation | None]":
    """The tensors of a repository in dense form, whose layout the model gets."""
    import math

    import torch

    from liger_models.convert.checkpoints.safetensors_header import TensorInfo
    from liger_models.convert.checkpoints.weight_map import checkpoint_shapes
    from liger_models.convert.quantised.reader import dense_tensors
    from liger_models.convert.quantised.recognition import recognise

    tensors = {}
    for tensor, (stated, shape) in headers.items():
        dtype = getattr(torch, stated)
        tensors[tensor] = TensorInfo(tensor, "", dtype, shape, 0, math.prod(shape) * dtype.itemsize)
    quantisation = recognise(Path(name), config, tensors, None)
    stored = tensors if quantisation is None else dense_tensors(tensors, quantisation, config)
    for layout in model.architecture.layouts:
        if checkpoint_shapes(model.weight_map(layout)).keys() <= stored.keys():
            model.layout = layout
            break
    return stored, quantisation


def _kept_bytes(model: "LigerCausalLM", stored: "Mapping[str, TensorInfo]", folder: Path) -> int | None:
    """The size of the model with its quantised weights in the bits of the files; None if it cannot be."""
    from liger_models.convert.errors import UnsupportedModelError
    from liger_models.models.stored_weights import keep_stored

    model.split_projections()
    try:
        keep_stored(model, stored, folder)
    except UnsupportedModelError:
        return None
    return sum(p.nbytes for p in model.parameters())


def _quantisation(found: "Quantisation", stored: "Mapping[str, TensorInfo]") -> dict[str, Any]:
    """The formats of the quantised weights, and the size of the checkpoint on disk and with dense tensors."""
    from collections import Counter

    labels = Counter(weight.format.label for weight in found.weights.values())
    dense = sum(info.nbytes for info in stored.values())
    saved = sum(stored[name].nbytes - weight.nbytes for name, weight in found.weights.items())
    return {
        "method": found.method,
        "weights": dict(labels),
        "bytes on disk": dense - saved,
        "bytes dense": dense,
    }


def _parameters(model: "LigerCausalLM", stored: "Mapping[str, TensorInfo]") -> list[dict[str, Any]]:
    from liger_models.convert.quantised.reader import QuantisedInfo

    def form(name: str) -> str:
        info = stored.get(name)
        if isinstance(info, QuantisedInfo):
            return info.weight.format.label
        return str(model.dtype if info is None else info.dtype).removeprefix("torch.")

    return [
        {
            "name": name,
            "shape": list(expr.shape),
            "dtype": "/".join(sorted({form(ref.name) for ref in expr.refs()})),
            "expression": _expression(expr),
            "from": {ref.name: list(ref.shape) for ref in expr.refs()},
        }
        for name, expr in model.weight_map().items()
    ]


def _expression(expr: "Expr") -> str:
    """Text of a weight-map expression: `cat(a, b)`, `stack(...)`, `permute(a, ...)`, or a name."""
    from liger_models.convert.checkpoints.expressions import Cat, Permute, Ref, Stack

    match expr:
        case Ref(name):
            return name
        case Cat(parts, dim):
            along = f", dim={dim}" if dim else ""
            return f"cat({', '.join(map(_expression, parts))}{along})"
        case Stack(parts):
            return f"stack({', '.join(map(_expression, parts))})"
        case Permute(part, view, order):
            return f"permute({_expression(part)}, {view}, {order})"
    raise TypeError(f"no text for a {type(expr).__name__}")


def _memory(model: "LigerCausalLM", stored: "Mapping[str, TensorInfo]") -> dict[str, Any]:
    import torch

    from liger_models.convert.quantised.reader import QuantisedInfo
    from liger_models.layers.recompute.activation_memory import LEVELS
    from liger_models.models.matching import exact_dtypes

    if stored:
        dtypes = {name: info.dtype for name, info in stored.items()}
        decoded = next((info.dtype for info in stored.values() if isinstance(info, QuantisedInfo)), None)
        model.materialize("meta", exact_dtypes(model, dtypes, decoded))
    dtype = model.dtype
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "weights": weights,
        "gradients": weights,
        # Two moments, and the residual bits of bfloat16 weights.
        "adamw": (3 if dtype == torch.bfloat16 else 2) * weights,
        "activations_per_token": {level: _saved_bytes(model, level, dtype.itemsize) for level in LEVELS},
    }


def _saved_bytes(model: "LigerCausalLM", level: Any, itemsize: int) -> int:
    return sum(layer.activation_bytes(level, itemsize) for layer in model.layers)


def _float8(model: "LigerCausalLM") -> dict[str, Any]:
    """Which linear layers would run in float8, why others would not, and the bytes that `lean` would save."""
    from liger_models.models.float8 import set_float8

    found = set_float8(model, "rowwise")
    kept = _saved_bytes(model, "lean", 2)
    set_float8(model, None)
    others = {path: reason for path, reason in found.items() if reason != "float8"}
    return {
        "layers": [path for path in found if path not in others],
        "others": others,
        "lean_per_token": kept,
    }


def print_report(report: dict[str, Any]) -> None:
    from liger_models.cli.shared.checkpoints import bytes_text, print_table

    spec, memory = report["spec"], report["memory"]
    print(
        f"{report['name']}: {report['architecture']} ({report['reference']}), "
        f"{report['num_parameters']:,} parameters\n"
    )
    print("Spec")
    for line in _spec_lines({name: value for name, value in spec.items() if name != "blocks"}):
        print(f"  {line}")
    for (first, last), block in _runs(spec["blocks"]):
        print(f"  layers {first} to {last}" if last > first else f"  layer {first}")
        for line in _spec_lines(block):
            print(f"    {line}")

    print("\nParameters and their checkpoint tensors")
    rows = []
    for row in _folded(report["parameters"]):
        rows.append((row["name"], str(row["shape"]), row["dtype"], f"= {row['expression']}"))
    print_table(rows)

    if copied := report["copied"]:
        shown = ", ".join(copied[:4]) + ", ..." * (len(copied) > 4)
        print(f"\n{len(copied)} tensors of the checkpoint are not parameters; exports copy them: {shown}")
    if quantised := report["quantisation"]:
        print(f"\nQuantised weights ({quantised['method']})")
        print_table([(format, f"{count} tensors") for format, count in quantised["weights"].items()])
        disk, dense = (bytes_text(quantised[key]) for key in ("bytes on disk", "bytes dense"))
        kept = quantised["bytes kept"]
        bits = "" if kept is None else f", {bytes_text(kept)} with --keep-quantised"
        print(f"  {disk} on disk, {dense} in memory{bits}")

    print(f"\nMemory, in {memory['dtype']}")
    print_table(
        [
            ("weights", bytes_text(memory["weights"])),
            ("gradients", bytes_text(memory["gradients"])),
            ("AdamW's state", bytes_text(memory["adamw"])),
        ]
    )
    layers = len(spec["blocks"])
    print(f"\nActivations saved for the backward pass, by --activation-memory ({layers} layers)")
    rows = [("level", "per token and layer", "per token", "8192 tokens")]
    for level, total in memory["activations_per_token"].items():
        rows.append((level, *map(bytes_text, (total / layers, total, total * 8192))))
    print_table(rows)
    in_float8, reasons = report["float8"]["layers"], sorted({*report["float8"]["others"].values()})
    print(f"\nWith --float8: {len(in_float8)} linear layers; others: {'; '.join(reasons) or 'none'}")
    if in_float8:
        total = report["float8"]["lean_per_token"]
        print(f"  at lean {bytes_text(total / layers)} per token and layer")


def _spec_lines(spec: dict[str, Any]) -> list[str]:
    """A spec's non-default settings on one line, with nested specs below."""
    plain = [
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in spec.items()
        if not isinstance(value, dict) and value is not None and value is not False
    ]
    lines = [", ".join(plain)] if plain else []
    for name, value in spec.items():
        if isinstance(value, dict):
            first, *rest = _spec_lines(value) or ["as by default"]
            lines += [f"{name}: {first}", *(f"  {line}" for line in rest)]
    return lines


def _runs(layers: list[Any]) -> list[tuple[tuple[int, int], Any]]:
    """Merge equal neighbours: ((first, last), layer)."""
    runs: list[tuple[tuple[int, int], Any]] = []
    for i, layer in enumerate(layers):
        if runs and runs[-1][1] == layer:
            runs[-1] = ((runs[-1][0][0], i), layer)
        else:
            runs.append(((i, i), layer))
    return runs


def _folded(parameters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the rows of equal neighbouring layers, with {first..last} as the layer number."""
    import itertools
    import re

    def layer_of(row: dict[str, Any]) -> str | None:
        found = re.match(r"layers\.(\d+)\.", row["name"])
        return found and found[1]

    def without_number(row: dict[str, Any], number: str) -> dict[str, Any]:
        shown = {key: row[key] for key in ("name", "shape", "dtype", "expression")}
        for key in ("name", "expression"):
            shown[key] = re.sub(rf"(?<=layers\.){number}(?=\.)", "{}", shown[key])
        return shown

    rows: list[dict[str, Any]] = []
    layers: list[list[dict[str, Any]]] = []
    for number, group in itertools.groupby(parameters, key=layer_of):
        if number is None:
            rows += _with_numbers(layers) + list(group)
            layers = []
        else:
            layers.append([without_number(row, number) for row in group])
    return rows + _with_numbers(layers)


def _with_numbers(layers: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for (first, last), layer in _runs(layers):
        numbers, number = (f"{{{first}..{last}}}", "{i}") if last > first else (str(first), str(first))
        for row in layer:
            name, expression = row["name"].replace("{}", numbers), row["expression"].replace("{}", number)
            rows.append({**row, "name": name, "expression": expression})
    return rows
