"""One rank of test_load_balance.py: two batches of its own under DDP, then one update of the biases.

The folder has task.pt. The results are the biases.
"""

from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from liger_models import update_correction_bias
from liger_models.layers.model.causal_lm import CausalLM


def results(folder: Path, rank: int, ranks: int, rate: str) -> list[torch.Tensor]:
    task = torch.load(folder / "task.pt", weights_only=False)
    model = CausalLM(task["spec"])
    model.load_state_dict(task["state"])
    parallel = DistributedDataParallel(model)
    for ids in task["batches"][rank::ranks]:
        parallel(ids, labels=ids).loss.backward()
    update_correction_bias(parallel, float(rate))
    return [buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
