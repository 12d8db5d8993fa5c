"""Measures a peer in a process that never imports this package.

    python benchmarks/training/alone.py FILE

FILE is written by `check.py`: the file of a peer, and the arguments of its `measure_alone`. Prints the result
as a line of JSON. Run as a file from another directory: transformers looks for a package called kernels, and
would find ours in the checkout.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch


def main(file: str) -> None:
    asked: dict[str, Any] = torch.load(file, weights_only=True)
    peer, device = _load(asked.pop("peer")), torch.device(asked["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    result = peer.measure_alone(asked | {"device": device})
    ours = sorted(name for name in sys.modules if name.partition(".")[0] == "liger_models")
    assert not ours, f"the process has imported {ours}"
    print(json.dumps(result))


def _load(file: str) -> Any:
    """Import a module by its file, without this folder on the path."""
    sys.path.remove(str(Path(__file__).parent))
    spec = importlib.util.spec_from_file_location("peer", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1])
