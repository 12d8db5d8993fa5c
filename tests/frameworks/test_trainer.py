"""transformers' Trainer trains a native model like its own."""

from __future__ import annotations

import warnings

import pytest
import torch
from trainer_parts import PLAIN, ROWS, make_rows

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

VOCABULARY = 61


@pytest.fixture
def train(tmp_path):
    """Function that trains a model by gradient descent, two steps of eight rows, and returns the Trainer."""

    def run(model, batch_size=ROWS, **settings):
        batches = {
            "per_device_train_batch_size": batch_size,
            "gradient_accumulation_steps": ROWS // batch_size,
        }
        arguments = transformers.TrainingArguments(str(tmp_path / "run"), **PLAIN | batches | settings)
        data = list(make_rows(VOCABULARY))
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
        trainer.train()
        return trainer

    return run


@pytest.fixture
def make_both(make_model, tmp_path):
    """Factory of a native model and of transformers' own with its weights."""

    def make(**changes):
        model = make_model(**changes)
        model.save_pretrained(tmp_path / "start")
        return model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "start")

    return make


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_close_parameters(found, expected):
    # Two float32 steps with gradients summed in another order: see BOUND in tests/architectures.
    for name, p in expected.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), p, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_accumulation_over_batches_equals_one_batch(batch_size, make_model, train):
    """Labels are counted over all batches: a mean of means would give more weight to rows with few labels."""
    whole, parts = make_model(), make_model()
    expected = losses(train(whole))
    assert losses(train(parts, batch_size)) == pytest.approx(expected, rel=1e-5)
    assert_close_parameters(parts, whole)


def test_training_equals_training_of_transformers_own_model(make_both, train):
    model, reference = make_both()
    assert losses(train(model, 2)) == pytest.approx(losses(train(reference, 2)), rel=1e-4)


def test_label_smoothing_equals_transformers_own_model(make_both, train):
    model, reference = make_both()
    expected = losses(train(reference, 2, label_smoothing_factor=0.2))
    assert losses(train(model, 2, label_smoothing_factor=0.2)) == pytest.approx(expected, rel=1e-4)


def test_evaluation_has_the_loss_of_the_model(make_model, train):
    trainer = train(make_model())
    batch = {
        name: torch.stack([row[name] for row in make_rows(VOCABULARY)]) for name in ("input_ids", "labels")
    }
    with torch.no_grad():
        expected = trainer.model(**batch).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_bf16_trains_like_autocast(make_model, train):
    model = make_model()
    batch = {
        name: torch.stack([row[name] for row in make_rows(VOCABULARY)]) for name in ("input_ids", "labels")
    }
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch).loss.item()
    assert losses(train(model, bf16=True))[0] == pytest.approx(expected, abs=1e-3)  # the order of the rows


@pytest.mark.skipif(
    not hasattr(transformers.TrainingArguments, "activation_checkpointing"),
    reason="this transformers has it only under its older name",
)
def test_checkpointing_is_switched_on_without_a_warning(make_model, train):
    expected, model = make_model(), make_model("mlp")
    train(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        train(model, activation_checkpointing=True, activation_checkpointing_kwargs={"every_n_layers": 2})
    assert model.activation_memory == ("checkpoint", "mlp")
    assert_close_parameters(model, expected)
