"""Fine-tune a checkpoint with transformers' Trainer, on our layers.

    python examples/train_with_trainer.py meta-llama/Llama-3.2-1B data.jsonl out

data.jsonl holds one {"prompt": ..., "completion": ...} per line; only completions are trained on. `out`
becomes a Hugging Face checkpoint.

It needs `pip install 'liger_models[hf]' accelerate`. A checkpoint of a few million parameters, such as
demo-output/run/final after `make demo`, trains on a CPU in seconds.
"""

import argparse
import json

import transformers

import liger_models.hf
from liger_models.optim.adamw import AdamW

IGNORED = -100


def main(checkpoint: str, data: str, out: str, **settings) -> transformers.Trainer:
    liger_models.hf.register()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    with open(data, encoding="utf-8") as lines:
        rows = [tokenize(tokenizer, **json.loads(line)) for line in lines]
    arguments = transformers.TrainingArguments(
        out, **{"per_device_train_batch_size": 4, "learning_rate": 2e-5, "report_to": "none", **settings}
    )
    # Rows are packed without padding; position ids restart at each.
    collator = transformers.DataCollatorWithFlattening()
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=rows,
        data_collator=collator,
        # torch's AdamW would lose most steps of bfloat16 weights to rounding.
        optimizer_cls_and_kwargs=(AdamW, {"lr": arguments.learning_rate}),
    )
    trainer.train()
    trainer.save_model(out)
    tokenizer.save_pretrained(out)
    return trainer


def tokenize(tokenizer, prompt: str, completion: str) -> dict[str, list[int]]:
    before = tokenizer(prompt)["input_ids"]
    after = tokenizer(completion, add_special_tokens=False)["input_ids"]
    if tokenizer.eos_token_id is not None:
        after.append(tokenizer.eos_token_id)
    return {"input_ids": before + after, "labels": [IGNORED] * len(before) + after}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("checkpoint", "data", "out"):
        parser.add_argument(name)
    main(**vars(parser.parse_args()))
