"""One rank of test_load_balance.py: two batches of its own under DDP, then one update of the biases.

Run as `python load_balance_rank.py FOLDER RATE`, with task.pt in the folder; writes rank0.pt or rank1.pt.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from liger_models import update_correction_bias
from liger_models.layers.model import CausalLM


def main(folder: Path, rate: float) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # They meet in a file: a port that was free a moment ago may be another test's by now.
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks)
    task = torch.load(folder / "task.pt", weights_only=False)
    model = CausalLM(task["spec"])
    model.load_state_dict(task["state"])
    parallel = DistributedDataParallel(model)
    for ids in task["batches"][rank::ranks]:
        parallel(ids, labels=ids).loss.backward()
    update_correction_bias(parallel, rate)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
    torch.save(biases, folder / f"rank{rank}.pt")
    del parallel, model  # what outlives its process group waits for ever now and then
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
