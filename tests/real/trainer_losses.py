"""Fine-tune with transformers' Trainer, and print its losses as JSON.

    python tests/real/trainer_losses.py MODEL CHATS DTYPE STEPS LR

Every step takes all conversations as one padded batch. The model is float32; the loss of its logits is
computed in DTYPE.
"""

import functools
import json
import sys
import tempfile
from typing import ClassVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments


def main(model_folder: str, chats: str, dtype: str, steps: str, lr: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    with open(chats, encoding="utf-8") as lines:
        conversations = [json.loads(line)["messages"] for line in lines]
    rows = [labelled(tokenizer, messages) for messages in conversations]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=int(steps),
            per_device_train_batch_size=len(rows),
            learning_rate=float(lr),
            adam_beta2=0.95,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        loss = functools.partial(mean_loss, dtype=getattr(torch, dtype))
        trainer = Recording(model, settings, train_dataset=rows, data_collator=padded, compute_loss_func=loss)
        trainer.train()
    print(json.dumps(Recording.losses))


def mean_loss(outputs, labels, num_items_in_batch, dtype):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits.to(dtype), targets, ignore_index=-100, reduction="sum")
    return loss / num_items_in_batch


class Recording(Trainer):
    losses: ClassVar[list[float]] = []  # unrounded, as they are not in the log

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def labelled(tokenizer, messages):
    """A conversation of a question and an answer, and labels on the answer."""
    prompt, whole = (
        tokenizer(text, add_special_tokens=False).input_ids
        for text in (
            tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False),
            tokenizer.apply_chat_template(messages, tokenize=False),
        )
    )
    assert whole[: len(prompt)] == prompt
    return {"input_ids": whole, "labels": [-100] * len(prompt) + whole[len(prompt) :]}


def padded(rows):
    width = max(len(row["input_ids"]) for row in rows)

    def fill(name, value):
        return torch.tensor([row[name] + [value] * (width - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(r["labels"]) + [0] * (width - len(r["labels"])) for r in rows])
    return {"input_ids": fill("input_ids", 0), "labels": fill("labels", -100), "attention_mask": mask}


if __name__ == "__main__":
    main(*sys.argv[1:])
