"""TRL's trainers run on our models as on transformers' own, with the same numbers."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets, which trl stands on, is not installed")

SETTINGS = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
}


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {chr(i): i for i in range(3, 128)} | {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sft(model, tokenizer, folder, **options):
    rows = [{"text": "some words " * (1 + i % 3)} for i in range(16)]
    if not options:  # the loss of completions alone
        rows = [{"prompt": "hello" + "x" * i, "completion": "answer" + "y" * (3 * i)} for i in range(8)]
    arguments = trl.SFTConfig(folder, max_length=32, **options, **SETTINGS)
    data = datasets.Dataset.from_list(rows)
    return trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)


def dpo(model, tokenizer, folder):
    rows = [
        {"prompt": "abc" + "d" * i, "chosen": "good " * (1 + i % 2), "rejected": "bad " * (1 + i % 3)}
        for i in range(8)
    ]
    data = datasets.Dataset.from_list(rows)
    arguments = trl.DPOConfig(folder, **SETTINGS)
    return trl.DPOTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)


WAYS = {
    "completions": sft,
    "packing": lambda *args: sft(*args, packing=True),
    "wrapped": lambda *args: sft(*args, packing=True, packing_strategy="wrapped"),
    "dpo": dpo,
}


@pytest.mark.supports("TRL", "SFT on completions", "SFT with packing, bfd and wrapped", "DPO")
@pytest.mark.parametrize("way", WAYS)
def test_training_equals_that_of_transformers_own_model(way, make_both, tokenizer, tmp_path):
    both = make_both("llama", tie_word_embeddings=True)
    reference = type(both.reference).from_pretrained(both.folder)  # DPO reads its own reference from there
    logs = []
    for model in (reference, both.ours):
        trainer = WAYS[way](model, tokenizer, str(tmp_path / "run"))
        trainer.train()
        logs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(logs[0]) == 2
    assert logs[1] == pytest.approx(logs[0], rel=1e-5)
