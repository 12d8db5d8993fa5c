"""One process of `python -m benchmarks resume`, as a rank of test_parallel.py."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.resume import _main


def results(folder: Path, rank: int, ranks: int, task: str) -> None:
    _main(json.loads(task), folder)
