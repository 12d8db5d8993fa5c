"""Trainer and TRL's trainers train a vision-language model like transformers' own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rounding import OtherOrder, beyond_rounding, relative_distance
from scenes import Image

from liger_models.layers.vision.patch_order import cut

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SETTINGS = {
    "max_steps": 2,
    "learning_rate": 0.3,  # parameters change by percents, far more than rounding
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "logging_steps": 1,
    "remove_unused_columns": False,
}
IMAGE = "@"


def compare(trainers, folder, train_again):
    """Compare logged losses and every parameter, in files with the same names.

    `train_again` trains transformers' own model once more, with sums in other orders, if the bound is missed.
    """
    expected = results(trainers[0], folder / "0")

    def distances(found):
        assert found.keys() == expected.keys()
        return {name: relative_distance(found[name], value) for name, value in expected.items()}

    def again(seed):
        with OtherOrder(seed):
            trainer = train_again()
        return distances(results(trainer, folder / f"again-{seed}"))

    assert not beyond_rounding(distances(results(trainers[1], folder / "1")), again)


def results(trainer, folder):
    logs = [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]
    assert len(logs) >= 2
    found = {}
    for i, entry in enumerate(logs):
        for name in {"loss", "eval_loss", "rewards/margins", "logps/chosen"} & entry.keys():
            found[f"{name} {i}"] = torch.tensor(entry[name])
    trainer.save_model(folder)
    return found | read(folder)


def read(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.supports("vision-language models", "Trainer, train, evaluate, resume")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_trainer_trains_evaluates_and_resumes(family, pair, both, tmp_path):
    """Some rows have several images, some none, and gradients of two batches are accumulated."""
    rows = [pair.scene(*row) for row in ([[1, Image(4, 4), 3], [9]], [[2, Image(6, 4), 1, Image(2, 4), 2]])]
    data = {"train_dataset": rows, "eval_dataset": rows[:1], "data_collator": lambda one: one[0]}

    def train(model, name):
        arguments = transformers.TrainingArguments(
            str(tmp_path / name),
            per_device_train_batch_size=1,
            # If theirs accepts no label count, it gives each batch the same weight.
            gradient_accumulation_steps=2 if getattr(both[0], "accepts_loss_kwargs", True) else 1,
            eval_strategy="steps",
            eval_steps=1,
            save_steps=1,
            prediction_loss_only=True,
            per_device_eval_batch_size=1,
            **SETTINGS,
        )
        trainer = transformers.Trainer(model, arguments, **data)
        trainer.train()
        return trainer

    start = copy.deepcopy(both[0])
    trainers = [train(model, f"run{i}") for i, model in enumerate(both)]
    compare(trainers, tmp_path, lambda: train(copy.deepcopy(start), "another_order"))
    auto = transformers.AutoModelForImageTextToText
    again = transformers.Trainer(auto.from_pretrained(tmp_path / "theirs"), trainers[1].args, **data)
    again.train(resume_from_checkpoint=str(tmp_path / "run1" / "checkpoint-1"))
    again.save_model(tmp_path / "again")
    expected, found = read(tmp_path / "1"), read(tmp_path / "again")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def make_processor(pair: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {chr(i): i for i in range(10, 128)} | {"<pad>": 0, "<eos>": 1, "<unk>": 2, "<image>": 3}
    made = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    return Processor(tokenizer, pair.ours.spec.vision)


class Processor(transformers.ProcessorMixin):
    """Make one token of each letter, and as many of "@" as its image has."""

    chat_template = None

    def __init__(self, tokenizer: Any, vision: Any):
        self.tokenizer, self.vision = tokenizer, vision

    def __repr__(self) -> str:
        return "Processor"

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
        call: dict[str, Any] = {}
        counts = iter(())
        if images is not None:
            merge, patches = self.vision.projector.merge, self.vision.patches
            pictures = [pixels_of(image) for row in images for image in row]
            if self.vision.positions is not None:
                made = [cut(picture, patches, merge) for picture in pictures]
                counts = iter([t * h * w // merge**2 for _, (t, h, w) in made])
                call["pixel_values"] = torch.cat([pixels for pixels, _ in made])
                call["image_grid_thw"] = torch.tensor([grid for _, grid in made])
            else:
                counts = iter([(picture.shape[1] // patches.size // merge) ** 2 for picture in pictures])
                call["pixel_values"] = torch.stack(pictures)
        rows = [
            [i for letter in row for i in ([3] * next(counts) if letter == IMAGE else [ord(letter)])]
            for row in text
        ]
        longest, left = max(map(len, rows)), options.get("padding_side") == "left"
        ids, mask = torch.zeros(len(rows), longest).long(), torch.zeros(len(rows), longest).long()
        for i, row in enumerate(rows):
            place = slice(longest - len(row), None) if left else slice(None, len(row))
            ids[i, place], mask[i, place] = torch.tensor(row), 1
        call |= {"input_ids": ids, "attention_mask": mask, self.vision.kinds: (ids == 3).long()}
        return transformers.BatchFeature(call)


def pixels_of(image: str) -> torch.Tensor:
    """Noise image of this side."""
    return 0.1 * torch.randn(3, int(image), int(image), generator=torch.Generator().manual_seed(0))


@pytest.mark.supports("vision-language models", "TRL, SFT, DPO")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("way", ["SFT", "DPO"])
def test_trl_trains_with_images(way, family, pair, both, tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets, which trl requires, is not installed")
    sides = ["12", "24", "12", "18"] if family == "qwen2_5_vl" else ["16"] * 4
    texts = {"prompt": ["a@bc", "@d", "ef@gh", "i@j"]}
    if way == "SFT":
        texts["completion"] = ["klm", "no", "p", "qrst"]
    else:
        texts |= {"chosen": ["klm", "no", "p", "qr"], "rejected": ["stu", "v", "wx", "yz"]}
    rows = datasets.Dataset.from_dict({**texts, "images": [[side] for side in sides]})
    processor = make_processor(pair)
    make, config = getattr(trl, f"{way}Trainer"), getattr(trl, f"{way}Config")

    def train(model, name):
        arguments = config(
            str(tmp_path / name), per_device_train_batch_size=4, save_strategy="no", **SETTINGS
        )
        more = {}
        if way == "DPO":
            more["ref_model"] = copy.deepcopy(model)
            with torch.no_grad():  # of a reference that differs from the trained model
                more["ref_model"].get_output_embeddings().weight.mul_(0.9)
        trainer = make(model, args=arguments, train_dataset=rows, processing_class=processor, **more)
        trainer.train()
        return trainer

    start = copy.deepcopy(both[0])
    trainers = [train(model, f"run{i}") for i, model in enumerate(both)]
    compare(trainers, tmp_path, lambda: train(copy.deepcopy(start), "another_order"))
