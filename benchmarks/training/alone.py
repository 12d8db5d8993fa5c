"""A peer's training step in a process that never imports anything of ours.

    python benchmarks/training/alone.py FILE

FILE is written by `check.py`: the peer, and its batch as tensors. Prints a line of JSON with the step's
milliseconds. Run as a file from another directory: transformers looks for a package called kernels, and would
find ours in the checkout.
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
    peer, device = _peer(), torch.device(asked["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = peer.build_peer(
        asked["config"], asked["reference"], set(asked["options"]), asked["memory"], device
    )
    optimizer = peer.fused_adamw(model, device)
    batch = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in asked["batch"].items()}
    times, _ = peer.time_steps(model, optimizer, batch, asked["warmup"], asked["steps"], device)
    ours = sorted(name for name in sys.modules if name.partition(".")[0] == "liger_models")
    assert not ours, f"the process has imported {ours}"
    print(json.dumps(peer.summary(times, asked["tokens"])))


def _peer() -> Any:
    """Import peer.py without its or our folder on the path."""
    sys.path.remove(str(Path(__file__).parent))
    spec = importlib.util.spec_from_file_location("peer", Path(__file__).with_name("peer.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1])
