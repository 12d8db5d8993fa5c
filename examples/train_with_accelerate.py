"""Fine-tune a checkpoint with accelerate, on one GPU or sharded over several by FSDP2.

    accelerate launch --num_processes 8 examples/train_with_accelerate.py CHECKPOINT data.jsonl out

data.jsonl and `out` are as in train_with_trainer.py.

It needs `pip install 'liger_models[hf]' accelerate`. A checkpoint of a few million parameters, such as
demo-output/run/final after `make demo`, trains on a CPU in seconds.
"""

import argparse
import json

import accelerate
import torch
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy
from train_with_trainer import tokenize

import liger_models.hf


def main(
    checkpoint: str, data: str, out: str, epochs: int = 1, batch_size: int = 4, learning_rate: float = 2e-5
) -> list[float]:
    liger_models.hf.register()
    plugin = accelerate.FullyShardedDataParallelPlugin(  # which one process does not need, and ignores
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        mixed_precision_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32),
    )
    accelerator = accelerate.Accelerator(fsdp_plugin=plugin)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    with open(data, encoding="utf-8") as lines:
        rows = [tokenize(tokenizer, **json.loads(line)) for line in lines]
    collator = transformers.DataCollatorWithFlattening()
    loader = torch.utils.data.DataLoader(rows, batch_size, shuffle=True, collate_fn=collator)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
    losses = []
    for _ in range(epochs):
        for batch in loader:
            # Gradients are averaged over processes: each divides by its share of the labels of all.
            labels = accelerator.reduce((batch["labels"] != -100).sum()).item()
            loss = model(**batch, num_items_in_batch=labels / accelerator.num_processes).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.unwrap_model(model).save_pretrained(out)  # all processes together; the first one writes
    if accelerator.is_main_process:
        tokenizer.save_pretrained(out)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("checkpoint", "data", "out"):
        parser.add_argument(name)
    main(**vars(parser.parse_args()))
