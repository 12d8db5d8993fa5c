"""sentence-transformers trains our base models and classifiers as it trains transformers' own."""

from __future__ import annotations

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture
from liger_models.models.base_model import LigerBaseModel

transformers = pytest.importorskip("transformers")
tools = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")

# Last-token pooling after causal attention with padding on the left, as Qwen3-Embedding; and means after
# bidirectional attention with windows, as EmbeddingGemma.
CASES = {
    "qwen3": ("lasttoken", "left", {}),
    "gemma3_text": ("mean", "right", {"use_bidirectional_attention": True}),
}
TEXTS = ["w5 w6 w7", "w8 w9 w10 w11 w12 w13 w14 w15 w16"]


def write(folder, family, task, side, **changes):
    """A tiny model of transformers' own, and a tokenizer of words w0 ... w130."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    tiny = {k: v for k, v in find_architecture(family).tiny.items() if v is not ...}
    config = transformers.AutoConfig.for_model(**{**tiny, "pad_token_id": 3, **changes})
    getattr(transformers, task).from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "w3", "unk_token": "w1", "padding_side": side}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)


def trained(folder, pooling, out):
    """The class of the model, embeddings before training, the losses, and embeddings after it."""
    from sentence_transformers import losses, models

    body = models.Transformer(str(folder), max_seq_length=32)
    parts = [body, models.Pooling(body.get_word_embedding_dimension(), pooling), models.Normalize()]
    model = tools.SentenceTransformer(modules=parts, device="cpu")
    before = model.encode(TEXTS)
    rows = range(4, 12)
    data = datasets.Dataset.from_dict(
        {
            "anchor": [f"w{i} w{i + 1} w{i + 2}" for i in rows],
            "positive": [f"w{i + 1} w{i + 7} w{i} w{2 * i} w9" for i in rows],
            "negative": [f"w{i + 50} w{i + 2}" for i in rows],
        }
    )
    options = tools.SentenceTransformerTrainingArguments(
        output_dir=str(out),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = tools.SentenceTransformerTrainer(model=model, args=options, train_dataset=data, loss=loss)
    trainer.train()
    model.save_pretrained(str(out))
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return type(body.model).__name__, before, torch.tensor(logged), model.encode(TEXTS)


@pytest.mark.supports("sentence-transformers", "training with in-batch negatives", "embeddings")
@pytest.mark.parametrize("family", CASES)
def test_training_and_embeddings_agree(family, tmp_path, hf):
    pooling, side, changes = CASES[family]
    write(tmp_path / "start", family, "AutoModel", side, **changes)
    theirs, *expected = trained(tmp_path / "start", pooling, tmp_path / "theirs")
    hf.register()
    ours, *found = trained(tmp_path / "start", pooling, tmp_path / "ours")
    assert ours == f"Liger{theirs}"
    assert len(found[1]) == 3
    for a, b in zip(found, expected, strict=True):
        # Adam divides by the gradient's size, so a gradient that is rounding only moves its weight, by at
        # most lr = 1e-3 a step; those of all others agree to 1e-5.
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-3, atol=1e-4)
    hf.unregister()
    again = tools.SentenceTransformer(str(tmp_path / "ours"), device="cpu").encode(TEXTS)
    torch.testing.assert_close(torch.as_tensor(again), torch.as_tensor(found[2]), rtol=0, atol=1e-6)

    native = liger_models.from_hub(tmp_path / "ours", device="cpu")
    assert type(native) is LigerBaseModel
    native.save_pretrained(tmp_path / "native")  # with the modules that follow the model
    again = tools.SentenceTransformer(str(tmp_path / "native"), device="cpu").encode(TEXTS)
    torch.testing.assert_close(torch.as_tensor(again), torch.as_tensor(found[2]), rtol=0, atol=1e-6)


@pytest.mark.supports("sentence-transformers", "rerankers")
def test_rerankers_agree(tmp_path, hf):
    write(tmp_path, "qwen3", "AutoModelForSequenceClassification", "right", num_labels=1)
    pairs = [(text, "w20 w21") for text in TEXTS]
    expected = tools.CrossEncoder(str(tmp_path), device="cpu").predict(pairs)
    hf.register()
    ours = tools.CrossEncoder(str(tmp_path), device="cpu")
    assert type(ours[0].model).__name__ == "LigerQwen3ForSequenceClassification"
    torch.testing.assert_close(
        torch.tensor(ours.predict(pairs)), torch.tensor(expected), rtol=1e-5, atol=1e-6
    )
