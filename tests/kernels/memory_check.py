"""Run every operation forward and backward at small odd sizes; test_memory.py does so under a memory checker.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --padding 1024 python tests/kernels/memory_check.py

Without its cache, PyTorch gives each tensor an allocation of its own, and the checker sees what lies outside.
"""

import sys

import torch
from kernel_operations import EVERYTHING, make_inputs, run_with_gradients

# Rows that do not fill a tile, of a width that no block divides.
SHAPE = (5, 37)

# Wider than the registers' room: other kernels, or other loops of theirs.
WIDE_SHAPE = (3, 20_001)
WIDE = ("add_rms_norm", "layer_norm", "swiglu", "softmax", "cross_entropy", "kl_div")


def run_everything(device: str) -> None:
    for name, op in EVERYTHING.items():
        for rows, width in [SHAPE, WIDE_SHAPE] if name in WIDE else [SHAPE]:
            run_with_gradients(op.run, make_inputs(op, rows, width, torch.bfloat16, device))


if __name__ == "__main__":
    run_everything(sys.argv[1] if len(sys.argv) > 1 else "cuda")
