"""Lightning's Trainer trains our models, native and in transformers, like transformers' own."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from hf_pairs import BOUND, relative_distance

import liger_models

transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning", reason="lightning is not installed")

ROWS, BATCHES = 8, 4


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends more workers
        yield


class FineTuning(lightning.LightningModule):
    """Module in the style of Lightning's documentation."""

    def __init__(self, model, optimizer=torch.optim.SGD, rate=0.3):
        super().__init__()
        self.model, self.optimizer, self.rate = model, optimizer, rate
        self.losses: list[float] = []

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return self.optimizer(self.model.parameters(), lr=self.rate)


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 131, (ROWS, 12), generator=generator)
    return [{"input_ids": row, "labels": row.masked_fill(torch.arange(12) < 3, -100)} for row in ids]


@pytest.fixture
def fit(rows, tmp_path):
    """Factory that trains a module for some epochs of four batches, and returns its trainer."""

    def run(module, epochs=1, checkpoint=None, **settings):
        module.model.train()
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **settings,
        )
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2), ckpt_path=checkpoint)
        return trainer

    return run


def load(kind, both):
    if kind == "native":
        return liger_models.from_pretrained(both.folder)
    return transformers.AutoModelForCausalLM.from_pretrained(both.folder)


@pytest.mark.supports("Lightning", "fit", "accumulated gradients", "native models", "models in transformers")
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}], ids=["plain", "accumulated"])
@pytest.mark.parametrize("kind", ["native", "hf"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_training_equals_training_of_transformers_own_model(family, kind, settings, make_both, fit, tmp_path):
    both = make_both(family)
    expected, found = FineTuning(both.reference), FineTuning(load(kind, both))
    for module in (expected, found):
        fit(module, **settings)
    assert len(expected.losses) == BATCHES
    assert found.losses == pytest.approx(expected.losses, rel=BOUND)
    found.model.save_pretrained(tmp_path / "trained")
    trained = type(both.reference).from_pretrained(tmp_path / "trained")
    for name, p in both.reference.named_parameters():
        assert relative_distance(trained.get_parameter(name), p) <= BOUND, name


@pytest.mark.supports("Lightning", "bf16-mixed", "bf16-true")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", ["native", "hf"])
def test_its_precisions_mean_autocast_and_bfloat16_parameters(kind, precision, make_both, fit, rows):
    both, mixed = make_both("llama"), precision == "bf16-mixed"
    found = FineTuning(load(kind, both), liger_models.optim.AdamW, 0.01)
    fit(found, precision=precision)
    plain = load(kind, both).train().to(torch.float32 if mixed else torch.bfloat16)
    optimizer, losses = liger_models.optim.AdamW(plain.parameters(), lr=0.01), []
    for batch in torch.utils.data.DataLoader(rows, batch_size=2):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert found.losses == losses
    expected = plain.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.model.state_dict().items())


@pytest.mark.supports("Lightning", "checkpoint", "bit-exact resuming")
@pytest.mark.parametrize("kind", ["native", "hf"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_resumed_run_equals_an_uninterrupted_one(family, kind, make_both, fit, tmp_path):
    both = make_both(family)
    whole, first, second = (FineTuning(load(kind, both), torch.optim.AdamW, 0.01) for _ in range(3))
    fit(whole, 2)
    fit(first, 1).save_checkpoint(tmp_path / "half.ckpt")
    fit(second, 2, tmp_path / "half.ckpt")
    assert first.losses + second.losses == whole.losses
    expected = whole.model.state_dict()
    for name, tensor in second.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    loaded = FineTuning.load_from_checkpoint(tmp_path / "half.ckpt", model=load(kind, both))
    halfway = first.model.state_dict()
    assert all(torch.equal(tensor, halfway[name]) for name, tensor in loaded.model.state_dict().items())
