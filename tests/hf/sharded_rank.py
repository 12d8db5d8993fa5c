"""One rank of test_sharded.py: trains checkpoints with accelerate, as its users write it, sharded or not.

Run under torchrun as `python sharded_rank.py FOLDER DEVICE`, with task.pt in the folder: the batch and, by
name, the cases. Writes FOLDER/results{rank}.pt, and FOLDER/NAME/trained of each case.
"""

import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file

import liger_models.hf

RATE = 0.05


def main(folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    if device == "cpu":
        let_cpus_shard()
    liger_models.hf.register()
    task = torch.load(folder / "task.pt", weights_only=False)
    results = {}
    for name, case in task["cases"].items():
        results[name] = train(folder / name, task["batch"], device, **case)
    torch.save(results, folder / f"results{PartialState().process_index}.pt")
    torch.distributed.destroy_process_group()


def let_cpus_shard() -> None:
    """accelerate switches its plugin for FSDP on for accelerators alone; everything behind that switch runs
    on CPUs as well.
    """
    begin = AcceleratorState.__init__

    def begin_sharded(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = begin_sharded


def train(
    folder: Path, batch: dict, device: str, fsdp: dict | None = None, level: str = "lean", **options: Any
) -> dict[str, Any]:
    """Two steps of gradient descent on this rank's share; the second one again from a saved state."""
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = None
    if fsdp is not None:
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **fsdp
        )
    accelerator = accelerate.Accelerator(cpu=device == "cpu", fsdp_plugin=plugin, **options)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.set_activation_memory(level)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    own = {name: value.chunk(ranks)[rank].to(accelerator.device) for name, value in batch.items()}
    # Gradients are averaged over ranks, so each divides by its share of the labels of all.
    num_items = int((batch["labels"][:, 1:] != -100).sum()) / ranks

    def step() -> float:
        loss = model(**own, num_items_in_batch=num_items).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return accelerator.reduce(loss.detach().float(), "mean").item()

    losses = [step()]
    accelerator.save_state(str(folder / "state"))
    losses.append(step())
    trained = accelerator.get_state_dict(model)
    accelerator.load_state(str(folder / "state"))
    again = step()
    wrapped = accelerator.unwrap_model(model)
    wrapped.save_pretrained(
        folder / "trained", is_main_process=accelerator.is_main_process, state_dict=trained
    )
    sent = {name: tensor.cpu() for name, tensor in wrapped.checkpoint_tensors()}
    accelerator.wait_for_everyone()
    saved = load_file(folder / "trained" / "model.safetensors")
    wrong = [name for name, tensor in sent.items() if not torch.equal(saved[name], tensor)]
    modules = wrapped.named_modules()
    return {
        "losses": losses,
        "again": again,
        "sent": set(sent),
        "sent_wrong": wrong,
        "shards": {name for name, module in modules if type(module).__name__.startswith("FSDP")},
        "dtypes": {p.dtype for p in wrapped.parameters()},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
