"""`liger-models bench`: the benchmarks of a checkout, `python -m benchmarks`, which gets all arguments."""

import argparse
from pathlib import Path


def add_parser(subparsers) -> None:
    subparsers.add_parser(
        "bench",
        help="measure kernels, training steps and loading beside their peers (from a checkout)",
        add_help=False,  # the benchmarks have their own
    )


def run(args: argparse.Namespace) -> int:
    import os
    import subprocess
    import sys

    from liger_models.convert.errors import LigerModelsError

    checkout = Path(__file__).parents[2]
    if not (checkout / "benchmarks" / "__main__.py").is_file():
        raise LigerModelsError(
            f"found no benchmarks in {checkout}: they stand in the repository and are not installed with the "
            "package. Clone it, and run `pip install -e '.[bench]'` there"
        )
    # Not by changing the folder: --out and the like are meant from the user's.
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, "-m", "benchmarks", *args.others], env=environment).returncode
