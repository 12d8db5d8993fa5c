"""One rank of test_trainer.py: two steps of Trainer, under whatever launched it.

Run as `python trainer_rank.py CHECKPOINT LOSSES`, with settings.json and rows.pt in CHECKPOINT; writes
CHECKPOINT/trained and LOSSES.
"""

import gc
import json
import sys
from pathlib import Path

import torch
import transformers

import liger_models.hf


def main(folder: Path, losses: Path) -> None:
    torch.set_num_threads(1)
    liger_models.hf.register()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    settings = json.loads((folder / "settings.json").read_text())
    arguments = transformers.TrainingArguments(output_dir=str(folder / "run"), **settings)
    trainer = transformers.Trainer(model, arguments, train_dataset=torch.load(folder / "rows.pt"))
    trainer.train()
    trainer.save_model(str(folder / "trained"))
    if trainer.is_world_process_zero():
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        losses.write_text(json.dumps(logged))
    del trainer, model  # what outlives its process group waits for ever now and then
    gc.collect()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
