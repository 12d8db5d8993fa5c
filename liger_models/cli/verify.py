"""`liger-models verify`: check a checkpoint's round trip, and its results against transformers.

First every parameter is converted into our layout and back, and the bytes are compared with the file's. Then,
if transformers is installed, logits, loss and every gradient are compared in float32 on random ids. The
distance |ours - theirs| / |theirs| of each tensor must be at most 1e-5. If a gradient nearly cancels, no two
float32 programs agree that closely; the bound is then the distance between two of transformers' own attention
implementations.

Exit code 1 if a byte differs or a distance is too large.
"""

import argparse
from typing import TYPE_CHECKING

from liger_models.cli.shared.arguments import MODEL
from liger_models.cli.shared.checkpoints import add_base

if TYPE_CHECKING:
    from liger_models.convert.checkpoints.round_trip import RoundTrip
    from liger_models.models.verification import Comparison

SHOWN = 10


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="compare a checkpoint's results with transformers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="MODEL", help=MODEL)
    add_base(parser)
    parser.add_argument(
        "--transformers",
        action=argparse.BooleanOptionalAction,
        help="compare with transformers (default: if it is installed and fits in memory)",
    )


def run(args: argparse.Namespace) -> int:
    import liger_models
    from liger_models.cli.shared.checkpoints import find_checkpoint
    from liger_models.convert.checkpoints.adapter import resolve_model
    from liger_models.models.base_model import LigerBaseModel
    from liger_models.models.classifier import LigerSequenceClassifier
    from liger_models.models.verification import verify_bytes, verify_numbers

    folder, adapter = resolve_model(find_checkpoint(args.name), args.base)
    if adapter is not None:
        model = liger_models.from_hub(adapter.folder, base=folder, device="cpu", dropout=0.0)  # or it raises
        print(
            f"adapter: fits {folder}: {len(adapter.layers())} layers of {model.num_parameters():,} parameters"
        )
        print("base model:")
        del model
    trip = verify_bytes(folder)
    _print_round_trip(trip)
    same = not trip.changed
    if args.transformers is False:
        return 0 if same else 1
    skeleton = liger_models.from_config(folder, device="meta", dropout=0.0)
    others = (LigerBaseModel, LigerSequenceClassifier)
    obstacle: str | None = f"only language models are compared, and this is a {type(skeleton).__name__}"
    if trip.quantised:
        obstacle = (
            "its weights are quantised, and transformers' own decoding is not exact for every format; export "
            "the checkpoint, and verify the export"
        )
    elif not isinstance(skeleton, others):
        obstacle = _obstacle(skeleton.num_parameters(), asked=args.transformers)
    if obstacle:
        print(f"not compared with transformers: {obstacle}")
        return 0 if same else 1
    comparison = verify_numbers(folder)
    _print_comparison(comparison)
    return 0 if same and not comparison.too_far else 1


def _print_round_trip(trip: "RoundTrip") -> None:
    from liger_models.cli.shared.checkpoints import bytes_text

    if trip.changed:
        print(f"round trip: {len(trip.changed)} of {trip.tensors} tensors CHANGED: {', '.join(trip.changed)}")
    else:
        decoded = " of dense weights" if trip.quantised else ""
        print(f"round trip: {trip.tensors} tensors, {bytes_text(trip.nbytes)}{decoded}, every byte the same")


def _print_comparison(found: "Comparison") -> None:
    from liger_models.cli.shared.checkpoints import print_table
    from liger_models.models.verification import ROWS

    media = [f"{n} random {kind}" for n, kind in ((found.images, "images"), (found.sounds, "sounds")) if n]
    images = f" with {' and '.join(media)}" if media else ""
    print(f"against transformers {found.transformers}, float32, {ROWS} x {found.length} random ids{images}:")
    rows = [("", "ours from theirs", "theirs among themselves")]
    for name in ["logits", "loss", *found.gradients[:SHOWN]]:
        title = name if name in ("logits", "loss") else f"gradient of {name}"
        rows.append((title, f"{found.distance[name]:.1e}", f"{found.spread[name]:.1e}"))
    print_table(rows)
    if len(found.gradients) > SHOWN:
        print(f"  and {len(found.gradients) - SHOWN} gradients that are closer")
    if found.lonely:
        print(f"  not compared, since only one side has them: {', '.join(found.lonely)}")
    far = found.too_far
    names = f": {', '.join(far[:SHOWN])}" if far else ""
    print(f"{len(found.distance)} compared, {len(far)} too far apart{names}")


def _obstacle(num_parameters: int, asked: bool | None) -> str | None:
    """Why the comparison with transformers is skipped; raises if it was requested and is impossible."""
    import importlib.util
    import os

    from liger_models.cli.shared.checkpoints import bytes_text
    from liger_models.convert.errors import LigerModelsError

    if importlib.util.find_spec("transformers") is None:
        if asked:
            raise LigerModelsError("transformers is not installed: pip install 'liger_models[hf]'")
        return "it is not installed (pip install 'liger_models[hf]')"
    # In float32: the model, its gradients, and the previous run's gradients.
    needed = 3 * 4 * num_parameters
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free and not asked:
        return (
            f"it needs {bytes_text(needed)} and {bytes_text(free)} are free; --transformers tries it anyway"
        )
    return None
