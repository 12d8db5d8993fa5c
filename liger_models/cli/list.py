"""`liger-models list`: show the supported architectures and the presets for new models."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liger_models.families import Family


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "list", help="show the supported models and the presets", description=__doc__
    )
    parser.add_argument(
        "--missing",
        action="store_true",
        help="show the models of transformers that are not supported, and why",
    )


def run(args: argparse.Namespace) -> None:
    if args.missing:
        return _list_missing()
    from liger_models.cards.results import SHARED, SHARED_NOTE, against_peers, read_card
    from liger_models.cli.shared.checkpoints import print_table
    from liger_models.families import list_families
    from liger_models.presets import PARAMETERS, PRESETS

    checkout = Path(__file__).parents[2]
    print("Architectures: model_type in config.json, models, and class in transformers; in a checkout also")
    print("the speed of a training step on a GPU relative to the fastest other library (from the cards):")
    rows = [
        (*_names(family), against_peers(read_card(family.model_type, checkout)))
        for family in list_families()
        if not (family.vision or family.audio)
    ]
    print_table(rows)
    if any(SHARED in speed for *_, speed in rows):
        print(f"  {SHARED_NOTE}")
    print("Multimodal models:")
    print_table([_names(family) for family in list_families() if family.vision or family.audio])
    print("Presets for new models (`init`, `train`):")
    print_table(
        [
            (name, config["model_type"], f"{PARAMETERS[name] / 1e6:,.1f} M parameters")
            for name, config in PRESETS.items()
        ]
    )


def _list_missing() -> None:
    from liger_models.architectures.registry.multimodal import MULTIMODAL
    from liger_models.architectures.registry.registry import ALIASES
    from liger_models.architectures.registry.unsupported import MISSING
    from liger_models.cli.shared.checkpoints import print_table
    from liger_models.families import list_families

    print("Not supported: model_type in config.json, and what is missing:")
    print_table(sorted(MISSING.items()))
    names = {family.model_type for family in list_families()}
    print("Supported in part, and what the rest needs:")
    print_table(
        [
            (name, MULTIMODAL[name].missing)
            for name in sorted(MULTIMODAL.keys() & names)
            if MULTIMODAL[name].missing
        ]
    )
    print("Supported without images and sound (text_only=True, or --text-only), and what these need:")
    print_table(
        [(name, MULTIMODAL[name].missing) for name in sorted(MULTIMODAL.keys() - names - ALIASES.keys())]
    )


def _names(family: "Family") -> tuple[str, str, str]:
    return family.model_type, family.about.name, family.reference
