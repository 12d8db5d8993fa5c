"""`liger-models card`: checks families, and writes what was found to docs/families, in a checkout.

Of each family, from its registration alone: transformers writes a tiny checkpoint with random parameters,
which is read, written back, compared with transformers, continued, trained, resumed and given back. Where
there are GPUs, a training step of real widths is measured beside transformers and liger-kernel, of all
families named in one run, a family on each GPU at a time; with --compiled beside these under torch.compile
too. What this machine cannot run stays as an earlier card has it. Each card is written as soon as something
of it is found. At the end, or at once where no family is named, the pages that are made from the registry and
the cards are renewed, the README's table of models among them.

Exit code 1 if a check failed.
"""

import argparse
from pathlib import Path


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "card",
        help="check a family against transformers and write its card (in a checkout)",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="a model_type; see `list`")
    parser.add_argument("--all", action="store_true", help="every family")
    parser.add_argument(
        "--only",
        action="append",
        metavar="CHECK",
        help="run only this check, such as training_step (repeatable)",
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="for the training step: also peers under torch.compile, which takes up to minutes for each",
    )
    parser.add_argument(
        "--repository",
        metavar="FOLDER",
        type=Path,
        default=Path(__file__).parents[2],
        help="where docs/families is (default: the checkout that this command is run from)",
    )


def run(args: argparse.Namespace) -> int:
    import importlib.util
    import sys
    from functools import partial

    from tqdm import tqdm

    from liger_models.architectures import Architecture, find_architecture, list_architectures
    from liger_models.cards import training_step
    from liger_models.cards.card import Card, Line, make_card, with_training_step
    from liger_models.cards.checks import CHECKS, TRAINING_STEP
    from liger_models.cards.pages import card_path, read_card, write_pages
    from liger_models.convert.errors import LigerModelsError

    if not (args.repository / "README.md").is_file():
        raise LigerModelsError(
            f"{args.repository} is not a checkout of liger_models; name one with --repository"
        )
    every = [*list_architectures(), *list_architectures(sees=True)]
    names = every if args.all else args.families
    families = [find_architecture(name) for name in names]
    if families and importlib.util.find_spec("transformers") is None:
        raise LigerModelsError("transformers is not installed: pip install 'liger_models[hf]'")
    checks = args.only or list(CHECKS)
    if unknown := set(checks) - CHECKS.keys():
        raise LigerModelsError(f"found --only {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    cards: dict[str, Card] = {}

    def show(family: Architecture, line: Line) -> None:
        verdict = {True: "passed", False: "FAILED", None: "not run"}[line.passed]
        reason = line.values.get("error") or line.values.get("not_run") or ""
        tqdm.write(f"{family.model_type}: {CHECKS[line.check].title}: {verdict} {reason}".rstrip())

    def keep(family: Architecture, card: Card) -> None:
        cards[family.model_type] = card
        card.write(card_path(family.model_type, args.repository))

    with tqdm(families, disable=len(families) < 2, unit="family", file=sys.stderr) as bar:
        for family in bar:
            bar.set_postfix_str(family.model_type)
            earlier = read_card(family.model_type, args.repository)
            keep(
                family,
                make_card(family, args.repository, earlier, checks, partial(show, family)),
            )
    if TRAINING_STEP in checks:
        for family, found in training_step.measure(families, args.repository, compiled=args.compiled):
            keep(family, with_training_step(cards[family.model_type], family, found))
            show(family, cards[family.model_type].lines[-1])
    for path in write_pages(args.repository):
        print(f"wrote {path}")
    return 0 if all(card.passed for card in cards.values()) else 1
