"""At fine-tuning learning rates, bfloat16 weights learn like float32 ones, but not if rounded to nearest."""

import itertools

import pytest
import torch

from liger_models.optim.adamw import AdamW
from liger_models.training.loop import Run
from liger_models.training.processes.world import World

STEPS = 40
# Below half an ulp of most weights, which are about 0.05: adjacent numbers are 0.0002 away.
RATE = 3e-5


@pytest.fixture(scope="module")
def fall(settings_for, tiny_checkpoint, tmp_path_factory):
    """Function that returns the decrease of the loss of one batch."""
    source = str(tiny_checkpoint(torch.bfloat16))

    def measure(**changes):
        config = settings_for(tmp_path_factory.mktemp("run"), model=source, eval_fraction=0.0, **changes)
        run = Run(config, World("cpu"))
        batch = run.documents.batch(run.stream.take(4))
        labels = int((batch.shift_labels != -100).sum())
        losses = []
        for _ in itertools.repeat(None, STEPS + 1):
            inputs = {"shift_labels": batch.shift_labels, "cu_seqlens": batch.cu_seqlens}
            loss = run.model(batch.input_ids, **inputs, num_items_in_batch=labels).loss
            loss.backward()
            losses.append(loss.item())
            for group in run.optimizer.param_groups:
                group["lr"] = RATE
            run.optimizer.step()
            run.optimizer.zero_grad()
        return losses[0] - losses[-1]

    return measure


def test_the_default_learns_as_float32_does_and_plain_does_not(fall):
    float32 = fall(dtype="float32")
    assert float32 > 0.05
    # A bfloat16 loss and its gradients have errors of 2^-8, which the mean over labels reduces.
    assert fall(dtype="bfloat16") == pytest.approx(float32, rel=0.04)
    assert fall(dtype="bfloat16", weights="stochastic") == pytest.approx(float32, rel=0.04)
    assert fall(dtype="bfloat16", weights="plain") < 0.4 * float32


def test_training_uses_the_optimizers_default(settings):
    defaults = AdamW([torch.nn.Parameter(torch.zeros(1))]).defaults
    assert (settings().weights, settings().moments) == (defaults["weights"], defaults["moments"])
