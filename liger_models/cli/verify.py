"""`liger-models verify`: that a checkpoint survives the round trip, and computes what transformers computes.

First every parameter is read into our layout and written back, and the bytes are compared with the file's.
Then, where transformers is installed, logits, loss and every gradient are compared in float32 on random ids.
The distance is |ours - theirs| / |theirs|, over a whole tensor, and must be at most 1e-5. Where a gradient
cancels to almost nothing no float32 program gets that close to another: there the measure is how far two of
transformers' own implementations of attention are from each other.

Exit code 1 if a byte or a distance is off.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from liger_models.causal_lm import LigerCausalLM

# float32 rounds to 6e-8, and between a parameter and its gradient lie some hundred roundings.
TOLERANCE = 1e-5
# Ours differs from theirs in more operations than the attention, which is all that their spread measures.
SPREADS = 4
ROWS, LENGTH = 2, 64
SHOWN = 10


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="check a checkpoint's round trip, and its numbers against transformers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="hub id, checkpoint folder, or a training run's folder")
    parser.add_argument(
        "--transformers",
        action=argparse.BooleanOptionalAction,
        help="compare with transformers (default: if it is installed and the memory suffices)",
    )


def run(args: argparse.Namespace) -> int:
    import liger_models
    from liger_models.cli.checkpoints import find_checkpoint

    folder = find_checkpoint(args.name)
    skeleton = liger_models.from_config(folder, device="meta")
    same = verify_bytes(folder, skeleton)
    if args.transformers is False:
        return 0 if same else 1
    obstacle = _obstacle(skeleton.num_parameters(), asked=args.transformers)
    if obstacle:
        print(f"not compared with transformers: {obstacle}")
        return 0 if same else 1
    length = min(LENGTH, skeleton.spec.position_limit or LENGTH)
    return 0 if verify_numbers(folder, length) and same else 1


def verify_bytes(folder: Path, skeleton: "LigerCausalLM") -> bool:
    """Compare every tensor with what comes back from our layout, one parameter at a time."""
    from liger_models.cli.checkpoints import bytes_text
    from liger_models.convert.checkpoints.reading import CheckpointReader, verify_roundtrip
    from liger_models.loading import exact_dtypes, find_layout

    with CheckpointReader(folder) as reader:
        find_layout(skeleton, reader)
        dtypes = exact_dtypes(skeleton, reader.dtypes)
        trip = verify_roundtrip(reader, skeleton.weight_map(), dtypes)
    if trip.changed:
        print(f"round trip: {len(trip.changed)} of {trip.tensors} tensors CHANGED: {', '.join(trip.changed)}")
    else:
        print(f"round trip: {trip.tensors} tensors, {bytes_text(trip.nbytes)}, every byte the same")
    return not trip.changed


def verify_numbers(folder: Path, length: int) -> bool:
    """Compare logits, loss and gradients with those of transformers, and print the largest distances."""
    import torch
    import transformers

    import liger_models
    from liger_models.cli.checkpoints import print_table
    from liger_models.convert.checkpoints.weight_map import checkpoint_shapes

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # One model after the other: both at once would need half as much again.
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.randint(
        reference.config.get_text_config().vocab_size,
        (ROWS, length),
        generator=torch.Generator().manual_seed(0),
    )
    expected = _results(reference, ids, labels=ids)
    expected |= {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    reference.zero_grad()  # lets go of the gradients, which are kept in `expected`
    again = _summed_otherwise(reference, ids)
    again |= {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    spread = {name: _distance(again[name], expected[name]) for name in expected}
    del reference, again

    model = liger_models.from_hub(folder, dtype=torch.float32, device="cpu")
    found = _results(model, ids, labels=ids, return_logits=True)
    tensors = model.saved_tensors()
    # By the names that the reference has in memory, which need not be those of the files.
    maps = [model.weight_map(layout) for layout in (model.layout, *model.architecture.layouts)]
    names = max(maps, key=lambda found: len(checkpoint_shapes(found).keys() & expected.keys()))
    for name, expr in names.items():
        gradient = tensors[name].grad
        if gradient is not None:  # as it is for a buffer
            found |= expr.write(gradient)

    distance = {name: _distance(found[name], expected[name]) for name in found.keys() & expected.keys()}
    gradients = sorted(distance.keys() - {"logits", "loss"}, key=lambda name: -distance[name])
    print(f"against transformers {transformers.__version__}, float32, {ROWS} x {length} random ids:")
    rows = [("", "ours from theirs", "theirs among themselves")]
    for name in ["logits", "loss", *gradients[:SHOWN]]:
        title = name if name in ("logits", "loss") else f"gradient of {name}"
        rows.append((title, f"{distance[name]:.1e}", f"{spread[name]:.1e}"))
    print_table(rows)
    if len(gradients) > SHOWN:
        print(f"  and {len(gradients) - SHOWN} gradients that are closer")
    if lonely := found.keys() ^ expected.keys():
        print(f"  not compared, since only one side has the name: {', '.join(sorted(lonely))}")
    far = [name for name in distance if not distance[name] <= max(TOLERANCE, SPREADS * spread[name])]
    print(f"{len(distance)} compared, {len(far)} too far apart{': ' if far else ''}{', '.join(far[:SHOWN])}")
    return not far


def _summed_otherwise(reference: Any, ids: "Tensor") -> dict[str, "Tensor"]:
    """The same results, with sums in another order: another attention, or the rows the other way round."""
    if reference._supports_sdpa:
        reference.set_attn_implementation("sdpa")
        return _results(reference, ids, labels=ids)
    results = _results(reference, ids.flip(0), labels=ids.flip(0))
    return {**results, "logits": results["logits"].flip(0)}


def _results(model: "nn.Module", ids: "Tensor", **options) -> dict[str, "Tensor"]:
    output = model(ids, **options)
    output.loss.backward()
    return {"logits": output.logits.detach(), "loss": output.loss.detach()}


def _distance(found: "Tensor", expected: "Tensor") -> float:
    found, expected = found.double(), expected.double()
    error, size = (found - expected).norm().item(), expected.norm().item()
    return error / size if size else error


def _obstacle(num_parameters: int, asked: bool | None) -> str | None:
    """Why the comparison with transformers is left out; an error if it was asked for and cannot be had."""
    import importlib.util
    import os

    from liger_models.cli.checkpoints import bytes_text
    from liger_models.convert.errors import LigerModelsError

    if importlib.util.find_spec("transformers") is None:
        if asked:
            raise LigerModelsError("transformers is not installed: pip install 'liger_models[hf]'")
        return "it is not installed (pip install 'liger_models[hf]')"
    # In float32: a model with its gradients, and the gradients of the run before.
    needed = 3 * 4 * num_parameters
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free and not asked:
        return (
            f"it takes {bytes_text(needed)} and {bytes_text(free)} are free; --transformers tries it anyway"
        )
    return None
