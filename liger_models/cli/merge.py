"""`liger-models merge`: merge a low-rank adapter into its base model, and write a checkpoint."""

import argparse

from liger_models.cli.export import add_arguments, run

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("merge", help="merge an adapter into its base model", description=__doc__)
    add_arguments(parser)
