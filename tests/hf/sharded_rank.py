"""One rank of test_sharded.py and test_deepspeed.py: train checkpoints sharded over processes, as users do.

Run under torchrun as `python sharded_rank.py FOLDER DEVICE`. FOLDER/task.pt has the batch and the cases by
name. Write FOLDER/results{rank}.pt, and FOLDER/NAME/trained for each case.
"""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from cpu_shards import let_cpus_shard
from safetensors.torch import load_file

import liger_models
import liger_models.hf

RATE = 0.05


def main(folder: Path, device: str) -> None:
    if device == "cpu":
        let_cpus_shard()
    liger_models.hf.register()
    task = torch.load(folder / "task.pt", weights_only=False)
    results = {}
    for name, (way, case) in task["cases"].items():
        AcceleratorState._reset_state(reset_partial_state=True)
        results[name] = WAYS[way](folder / name, task["batch"], device, **case)
        gc.collect()  # transformers uses a DeepSpeed config for as long as the object exists
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    torch.save(results, folder / f"results{PartialState().process_index}.pt")
    torch.distributed.destroy_process_group()


def train_with_accelerate(
    folder: Path, batch: dict, device: str, fsdp: dict | None = None, level: str = "lean"
) -> dict[str, Any]:
    """Train two steps of gradient descent on this rank's share; repeat the second from a saved state."""
    plugin = None
    if fsdp is not None:
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **fsdp
        )
    accelerator = accelerate.Accelerator(cpu=device == "cpu", fsdp_plugin=plugin)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.set_activation_memory(level)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    own, num_items = share_of(batch, accelerator.process_index, accelerator.num_processes)
    own = {name: value.to(accelerator.device) for name, value in own.items()}

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
    accelerator.wait_for_everyone()
    shards = {name for name, module in wrapped.named_modules() if type(module).__name__.startswith("FSDP")}
    return {"losses": losses, "again": again, "shards": shards, **compare_sent(wrapped, folder)}


def train_with_trainer(folder: Path, batch: dict, device: str, **settings: Any) -> dict[str, Any]:
    """Train two steps with Trainer. ZeRO-3 needs the arguments before the model, to shard tensors on load."""
    plain = {
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
    }
    arguments = transformers.TrainingArguments(str(folder / "run"), **plain | settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    empty = sum(p.numel() == 0 for p in model.parameters())
    rows = [{name: value[i] for name, value in batch.items()} for i in range(len(batch["input_ids"]))]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(folder / "trained"))
    trainer.accelerator.wait_for_everyone()
    model.save_pretrained(folder / "by_hand")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "empty": empty, **compare_sent(model, folder)}


def train_with_deepspeed(
    folder: Path, batch: dict, device: str, config: dict, level: str, scored: bool = False
) -> dict[str, Any]:
    """Train a native model for two steps in a DeepSpeed engine, by its loss or its scores."""
    import deepspeed

    rank, ranks = PartialState(cpu=device == "cpu").process_index, PartialState().num_processes
    model = liger_models.from_pretrained(folder, activation_memory=level)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    own, num_items = share_of(batch, rank, ranks)
    losses = []
    for _ in range(2):
        if scored:
            scores = engine(**own, score=liger_models.ScoreOptions())
            loss = -scores.log_probs.sum() / num_items
        else:
            loss = engine(**own, num_items_in_batch=num_items).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
        torch.distributed.all_reduce(losses[-1])
    model.save_pretrained(folder / "trained")
    PartialState().wait_for_everyone()
    return {"losses": [loss.item() / ranks for loss in losses], **compare_sent(model, folder)}


WAYS = {
    "accelerate": train_with_accelerate,
    "trainer": train_with_trainer,
    "deepspeed": train_with_deepspeed,
}


def share_of(batch: dict, rank: int, ranks: int) -> tuple[dict, float]:
    """Return this rank's rows, and its share of all labels as divisor, since gradients are averaged."""
    own = {name: value.chunk(ranks)[rank] for name, value in batch.items()}
    return own, int((batch["labels"][:, 1:] != -100).sum()) / ranks


def compare_sent(model: Any, folder: Path) -> dict[str, Any]:
    """Return the names from `checkpoint_tensors`, and those whose tensors differ from the saved ones."""
    sent = {name: tensor.cpu() for name, tensor in model.checkpoint_tensors()}
    saved = load_file(folder / "trained" / "model.safetensors")
    return {"sent": set(sent), "sent_wrong": [n for n, x in sent.items() if not torch.equal(saved[n], x)]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
