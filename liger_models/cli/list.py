"""`liger-models list`: show the supported architectures and the presets for new models."""

import argparse
from pathlib import Path


def add_parser(subparsers) -> None:
    subparsers.add_parser("list", help="show supported architectures and presets", description=__doc__)


def run(args: argparse.Namespace) -> None:
    import liger_models
    from liger_models.architectures import find_architecture
    from liger_models.architectures.registry.about import about
    from liger_models.cards.pages import against_peers, read_card
    from liger_models.cli.shared.checkpoints import print_table
    from liger_models.presets import PRESETS

    architectures = [find_architecture(name) for name in liger_models.list_architectures()]
    print("Architectures: model_type in config.json, models, and class in transformers; in a checkout also")
    print("the speed of a training step on a GPU relative to the fastest other library (from the cards):")
    checkout = Path(__file__).parents[2]
    print_table(
        [
            (
                family.model_type,
                about(family).name,
                family.reference,
                against_peers(read_card(family.model_type, checkout)),
            )
            for family in architectures
        ]
    )
    multimodal = [find_architecture(name) for name in liger_models.list_architectures(vision=True)]
    print("Vision-language models:")
    print_table([(family.model_type, about(family).name, family.reference) for family in multimodal])
    print("Presets for new models (`init`, `train`):")
    rows = []
    for name, config in PRESETS.items():
        count = liger_models.from_config(config, device="meta").num_parameters()
        rows.append((name, config["model_type"], f"{count / 1e6:,.1f} M parameters"))
    print_table(rows)
