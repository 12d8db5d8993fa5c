"""Measurements each in a process of its own: a library that ran earlier may have changed torch's choices.

A command measures a part of its work in a process of its own by `rows_apart`, which runs the command for that
part alone with `--rows FILE`, where it leaves its rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT

Rows = list[dict[str, Any]]


def add_rows_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", metavar="FILE", help=argparse.SUPPRESS)


def rows_apart(command: Sequence[str], provider: str) -> Rows:
    """The rows that `python -m benchmarks COMMAND` measures in a process of its own, or one with a note."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        asked = [sys.executable, "-m", "benchmarks", *command, "--rows", str(file), "--out", folder]
        # Growing segments waste no memory between blocks; for every provider alike.
        environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        done = subprocess.run(asked, cwd=ROOT, env=environment, stdout=sys.stderr)
        if file.is_file():
            return json.loads(file.read_text())
    return [{"provider": provider, "note": f"failed: the process ended with exit code {done.returncode}"}]


def write_rows(file: str, rows: Rows) -> None:
    Path(file).write_text(json.dumps(rows))
