"""transformers' Trainer and accelerate train our models with the same numbers as its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hf_pairs import BOUND, relative_distance
from pairs import reference_class
from trainer_parts import LENGTH, PLAIN, ROWS, make_rows

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import DataError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

VOCABULARY = 131


@pytest.fixture
def make_trainer(tmp_path):
    """Factory of Trainers, by default with plain gradient descent over eight rows per step."""

    def make(model, batch_size=2, name="run", more=(), **settings):
        batches = {
            "per_device_train_batch_size": batch_size,
            "gradient_accumulation_steps": ROWS // batch_size,
        }
        arguments = transformers.TrainingArguments(str(tmp_path / name), **{**PLAIN, **batches, **settings})
        data = list(make_rows(VOCABULARY))
        return transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data, **dict(more))

    return make


@pytest.fixture
def train(make_trainer):
    def run(model, *args, **settings):
        trainer = make_trainer(model, *args, **settings)
        trainer.train()
        return trainer

    return run


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def summed_loss(outputs, labels, num_items_in_batch=None):
    labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    total = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / num_items_in_batch


SETTINGS = {
    "accumulation": {},
    "one_batch": {"batch_size": 8},
    "label_smoothing": {"label_smoothing_factor": 0.2},
    "checkpointing": {"gradient_checkpointing": True},
    "neftune": {"neftune_noise_alpha": 5.0},
    "own_loss": {"more": {"compute_loss_func": summed_loss}},
    "adamw": {"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 1.0},
}


# Families whose classes Trainer does not know: those of another family, and those with images.
@pytest.mark.parametrize("family", ["internlm3", "qwen2_5_vl"])
@pytest.mark.parametrize("kind", ["registered", "native"])
def test_label_smoothing_shifts_the_labels_of_every_family(family, kind, hf, make_trainer):
    config, weight = find_architecture(family).tiny, 0.2
    if kind == "registered":
        reference_class(find_architecture(family))  # or skip
        own = transformers.AutoConfig.for_model(**config)
        model = hf.classes_of(family).causal_lm(own)
        assert repr(model).startswith(model.base_class.__name__.removeprefix("Liger").removesuffix("Model"))
    else:
        model = liger_models.from_config(config)
    trainer = make_trainer(model.eval(), label_smoothing_factor=weight)
    batch = {key: torch.stack([row[key] for row in make_rows(VOCABULARY)]) for key in ("input_ids", "labels")}
    batch["input_ids"].clamp_(10)  # smaller ones are of images
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        targets = logits[labels >= 0], labels[labels >= 0]
        expected = F.cross_entropy(*targets, label_smoothing=weight)
        found = trainer.compute_loss(model, batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


# Per-layer inputs, keys shared between layers, experts of several kinds, latent attention, other module
# names, several residual streams.
ODD = ("gemma4_text", "llama4_text", "deepseek_v3", "gpt_oss", "starcoder2", "deepseek_v4")


@pytest.mark.supports(
    "Trainer",
    "train",
    "accumulation with uneven labels",
    "label smoothing",
    "gradient checkpointing",
    "NEFTune",
    "compute_loss_func",
)
@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(("llama", way) for way in SETTINGS),
        *(("qwen3_moe", way) for way in ("accumulation", "checkpointing")),
        *((family, "checkpointing") for family in ODD),
    ],
)
def test_training_equals_training_of_transformers_own_model(family, way, make_both, train):
    both = make_both(family, tie_word_embeddings=family == "llama")
    expected = losses(train(both.reference, **SETTINGS[way]))
    assert losses(train(both.ours, **SETTINGS[way])) == pytest.approx(expected, rel=1e-5)
    if way != "adamw":  # AdamW turns a gradient that is only rounding into a step of the full rate
        both.ours.save_pretrained(both.folder)
        assert_same_parameters(both)


def assert_same_parameters(both):
    trained = type(both.reference).from_pretrained(both.folder)
    for name, p in both.reference.named_parameters():
        assert relative_distance(trained.get_parameter(name), p) <= BOUND, name


def flattened(rows, first_label):
    """Pack rows as documents of one row, with or without labels on their first tokens."""
    labels = [row["labels"].where(torch.arange(LENGTH) > 0, first_label(row["labels"])) for row in rows]
    return {
        "input_ids": torch.cat([row["input_ids"] for row in rows])[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.arange(LENGTH).repeat(len(rows))[None],
    }


def test_the_loss_of_packed_rows_is_the_mean_over_predicted_labels(make_both, make_trainer):
    """Trainer counts all given labels, so labels that no token predicts are refused rather than skipped."""
    both = make_both("llama")
    rows = list(make_rows(VOCABULARY))
    with torch.no_grad():
        expected = both.ours(**flattened(rows, lambda labels: labels[0])).loss.item()

    def run(first_label):
        more = {"data_collator": lambda batch: flattened(batch, first_label)}
        trainer = make_trainer(both.ours, batch_size=4, more=more, max_steps=1)
        trainer.train()
        return losses(trainer)[0]

    with pytest.raises(DataError, match="first tokens of 3 packed documents have labels"):
        run(lambda labels: labels[-1])
    # float32, in two parts; the log is rounded to four decimal places
    assert run(lambda labels: torch.tensor(-100)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.supports("Trainer", "bf16")
def test_bf16_means_autocast(make_both, make_trainer):
    both = make_both("llama")
    trainer = make_trainer(both.ours, batch_size=8, bf16=True)
    batch = {
        name: torch.stack([row[name] for row in make_rows(VOCABULARY)])
        for name in next(make_rows(VOCABULARY))
    }
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = both.ours.train()(**batch).loss.item()
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(expected, abs=1e-3)  # the rows are in another order
    assert {p.dtype for p in both.ours.parameters()} == {torch.float32}


@pytest.mark.supports("Trainer", "evaluate", "compute_metrics")
def test_metrics_get_the_logits_and_the_loss_matches_the_reference(make_both, make_trainer):
    both = make_both("gemma2")
    seen = {}

    def metrics(prediction):
        seen["logits"] = torch.as_tensor(prediction.predictions)
        return {"rows": len(prediction.predictions)}

    found, expected = (
        make_trainer(model, more={"compute_metrics": metrics}).evaluate()
        for model in (both.ours, both.reference)
    )
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert found["eval_rows"] == ROWS
    assert seen["logits"].shape == (ROWS, LENGTH, 131)
    assert make_trainer(both.ours).evaluate()["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)


@pytest.mark.supports("Trainer", "bit-exact resuming")
@pytest.mark.parametrize(
    ("family", "projections"),
    [("qwen3_moe", "fused"), ("deepseek_v3", "split"), ("gpt_oss", "split")],
)
def test_a_resumed_run_equals_an_uninterrupted_one(family, projections, make_both, make_trainer, hf):
    settings = {"optim": "adamw_torch", "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    both = make_both(family, projections=projections)
    load = transformers.AutoModelForCausalLM.from_pretrained
    whole = make_trainer(load(both.folder), **settings)
    whole.train()
    folder = Path(whole.args.output_dir) / "checkpoint-2"
    resumed = make_trainer(load(both.folder), name="resumed", **settings)
    resumed.train(resume_from_checkpoint=str(folder))
    for name, p in whole.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), p), name


@pytest.mark.supports("PEFT", "bit-exact resuming")
def test_a_resumed_run_of_an_adapter_equals_an_uninterrupted_one(make_both, make_trainer):
    peft = pytest.importorskip("peft")
    settings = {"optim": "adamw_torch", "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    both = make_both("llama", projections="split")

    def adapted():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(both.folder)
        config = peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)

    whole = make_trainer(adapted(), **settings)
    whole.train()
    resumed = make_trainer(adapted(), name="resumed", **settings)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
    for name, p in whole.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), p), name


@pytest.mark.supports("Trainer", "load_best_model_at_end")
def test_the_best_model_is_loaded_at_the_end(make_both, make_trainer):
    both = make_both("llama")
    trainer = make_trainer(
        both.ours,
        learning_rate=30.0,  # makes the model worse
        max_steps=3,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
    )
    trainer.train()
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert min(evaluated) < evaluated[-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(evaluated), rel=1e-6)


@pytest.mark.supports("Trainer", "load balancing by correction biases")
def test_the_callback_moves_the_correction_bias_against_the_load_of_a_step(make_both, make_trainer, hf):
    model = make_both("deepseek_v3").ours
    routers = [m for m in model.modules() if hasattr(m, "correction_bias")]
    chosen = {router: torch.zeros_like(router.correction_bias) for router in routers}
    before = [router.correction_bias.clone() for router in routers]

    def count(router, _, routed):
        chosen[router] += routed[2].flatten().bincount(minlength=len(chosen[router]))

    for router in routers:
        router.register_forward_hook(count)
    make_trainer(model, max_steps=1, more={"callbacks": [hf.CorrectionBiasCallback(0.25)]}).train()
    assert routers
    for router, bias in zip(routers, before, strict=True):
        expected = bias + 0.25 * (chosen[router].mean() - chosen[router]).sign()  # over four batches together
        assert torch.equal(router.correction_bias, expected)


def test_the_callback_is_refused_if_no_router_has_a_bias(make_both, make_trainer, hf):
    trainer = make_trainer(make_both("qwen3_moe").ours, more={"callbacks": [hf.CorrectionBiasCallback()]})
    with pytest.raises(ValueError, match="leave it out"):
        trainer.train()


@pytest.mark.supports("accelerate", "prepare", "save_state and load_state")
def test_accelerate_prepares_saves_and_loads(make_both, batch, tmp_path):
    import accelerate

    both = make_both("qwen3_moe", tie_word_embeddings=True)
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(both.ours.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(both.ours.train(), optimizer)

    def step():
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    accelerator.save_state(str(tmp_path / "state"))
    expected = [step(), step()]
    accelerator.load_state(str(tmp_path / "state"))
    assert [step(), step()] == expected
    assert model._no_split_modules >= {type(layer).__name__ for layer in both.ours.model.layers}


@pytest.mark.supports("accelerate", "bf16")
def test_accelerates_bf16_means_autocast(make_both, batch):
    import accelerate

    both = make_both("llama")
    with torch.autocast("cpu", torch.bfloat16):
        loss = both.ours.train()(**batch).loss
    loss.backward()
    expected = {name: p.grad.clone() for name, p in both.ours.named_parameters()}
    both.ours.zero_grad()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(both.ours)
    found = model(**batch)
    accelerator.backward(found.loss)
    assert torch.equal(found.loss, loss)
    assert found.loss.dtype == torch.float32
    for name, p in accelerator.unwrap_model(model).named_parameters():
        assert p.dtype == torch.float32
        assert torch.equal(p.grad, expected[name]), name
    theirs = accelerator.prepare(both.reference.train())(**batch).loss
    # bfloat16 products round by 2^-9 of their terms; over a dozen tokens that is less than 2^-7 of a loss.
    assert relative_distance(found.loss, theirs) <= 2**-7


@pytest.mark.parametrize("kind", ["transformers", "adapted", "native"])
def test_data_parallel_in_one_process_is_refused_with_a_remedy(kind, make_both, monkeypatch):
    """Trainer wraps a model in DataParallel if its process has several GPUs.

    The test replaces only the copies between GPUs by copies on a CPU.
    """
    model = make_both("llama").ours
    if kind == "native":
        model = liger_models.from_config(find_architecture("llama").tiny, device="cpu")
    if kind == "adapted":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["o_proj"]))

    def copies(tensors, devices, detach=False):
        return [[tensor.clone() for tensor in tensors] for _ in devices]

    monkeypatch.setattr(sys.modules["torch.nn.parallel.replicate"], "_broadcast_coalesced_reshape", copies)
    with pytest.raises(RuntimeError, match=r"DataParallel.*torchrun.*CUDA_VISIBLE_DEVICES"):
        torch.nn.parallel.replicate(model, [0, 1])
