"""Train a LoRA adapter with TRL and PEFT, on our layers, and merge it.

    python examples/train_with_trl.py meta-llama/Llama-3.2-1B data.jsonl out

data.jsonl holds one {"prompt": ..., "completion": ...} per line; only completions are trained on. The
adapter in `out/adapter` bears the usual names (q_proj, k_proj, ...) and loads on transformers' own model,
too; `out/merged` is a Hugging Face checkpoint.

It needs `pip install trl peft`. A checkpoint of a few million parameters, such as
demo-output/run/final after `make demo`, trains on a CPU in seconds.
"""

import argparse

import datasets
import peft
import torch
import transformers
import trl

import liger_models.hf


def main(checkpoint: str, data: str, out: str, **settings) -> trl.SFTTrainer:
    liger_models.hf.register(projections="split")  # layers with the names that PEFT looks for
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    adapter = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    defaults = {"learning_rate": 2e-4, "packing": True, "max_length": 2048, "report_to": "none"}
    defaults["bf16"] = torch.cuda.is_available()  # TRL's default needs a GPU
    trainer = trl.SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(checkpoint),
        args=trl.SFTConfig(out, **{**defaults, **settings}),
        train_dataset=datasets.Dataset.from_json(data),
        processing_class=tokenizer,
        peft_config=adapter,
    )
    trainer.train()
    trainer.model.save_pretrained(f"{out}/adapter")
    trainer.model.merge_and_unload().save_pretrained(f"{out}/merged")
    tokenizer.save_pretrained(f"{out}/merged")
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("checkpoint", "data", "out"):
        parser.add_argument(name)
    main(**vars(parser.parse_args()))
