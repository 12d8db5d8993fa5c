"""`liger-models card`: renews the pages that are made from the registry of families, in a checkout."""

import argparse
from pathlib import Path


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "card", help="renew the pages that are made from the registry of families", description=__doc__
    )
    parser.add_argument(
        "--repository", metavar="FOLDER", type=Path, default=Path(), help="a checkout (default: here)"
    )


def run(args: argparse.Namespace) -> None:
    from liger_models.cards.pages import write_pages

    for path in write_pages(args.repository):
        print(f"wrote {path}")
