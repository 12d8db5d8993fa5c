"""`liger-models bench`: run a checkout's benchmarks, forwarding all arguments to `python -m benchmarks`."""

import argparse
from pathlib import Path


def add_parser(subparsers) -> None:
    subparsers.add_parser(
        "bench",
        help="compare speed with other libraries (in a checkout)",
        description=__doc__,
        add_help=False,  # handled by the benchmarks
    )


def run(args: argparse.Namespace) -> int:
    import os
    import subprocess
    import sys

    from liger_models.convert.errors import LigerModelsError

    checkout = Path(__file__).parents[2]
    if not (checkout / "benchmarks" / "__main__.py").is_file():
        raise LigerModelsError(
            f"found no benchmarks in {checkout}: they are in the repository and not installed with the "
            "package. Clone it, and run `pip install -e '.[bench]'` there"
        )
    # Without changing the working directory: --out and others are relative to the user's.
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, "-m", "benchmarks", *args.others], env=environment).returncode
