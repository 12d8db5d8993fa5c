"""Train a LoRA adapter with PEFT and Trainer, on our layers, and merge it.

    python examples/train_with_peft.py meta-llama/Llama-3.2-1B data.jsonl out

The adapter in `out/adapter` bears the usual names (q_proj, k_proj, ...) and loads on transformers' own model,
too; `out/merged` is a checkpoint of transformers.
"""

import json
import sys
from pathlib import Path

import peft
import transformers
from train_with_trainer import tokenize

import liger_models.hf


def main(checkpoint: str, data: str, out: str, **settings) -> transformers.Trainer:
    liger_models.hf.register(projections="split")  # layers with the names that PEFT looks for
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with open(data, encoding="utf-8") as lines:
        rows = [tokenize(tokenizer, **json.loads(line)) for line in lines]
    arguments = transformers.TrainingArguments(
        out, **{"per_device_train_batch_size": 4, "learning_rate": 2e-4, "report_to": "none", **settings}
    )
    collator = transformers.DataCollatorWithFlattening()
    trainer = transformers.Trainer(adapted, arguments, train_dataset=rows, data_collator=collator)
    trainer.train()
    adapted.save_pretrained(Path(out) / "adapter")
    adapted.merge_and_unload().save_pretrained(Path(out) / "merged")
    tokenizer.save_pretrained(Path(out) / "merged")
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
