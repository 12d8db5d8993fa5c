"""`liger-models list`: what can be read, and the presets that can be made fresh."""

import argparse


def add_parser(subparsers) -> None:
    subparsers.add_parser("list", help="supported architectures and presets", description=__doc__)


def run(args: argparse.Namespace) -> None:
    import liger_models
    from liger_models.architectures import find_architecture
    from liger_models.architectures.about import about
    from liger_models.cli.checkpoints import print_table
    from liger_models.presets import PRESETS

    architectures = [find_architecture(name) for name in liger_models.list_architectures()]
    print("Architectures: the model_type of config.json, the models, and their class in transformers:")
    print_table([(family.model_type, about(family).name, family.reference) for family in architectures])
    print("Presets, for fresh models (`init`, `train`):")
    rows = []
    for name, config in PRESETS.items():
        count = liger_models.from_config(config, device="meta").num_parameters()
        rows.append((name, config["model_type"], f"{count / 1e6:,.1f} M parameters"))
    print_table(rows)
