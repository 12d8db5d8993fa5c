import csv
import itertools
import json
import math
import sys

import pytest
import torch
from ranks import Fork
from torch import nn

import liger_models
from liger_models.convert.errors import ConfigError, DataError, TrainingError
from liger_models.layers.recurrent.short_conv import ShortConvolution
from liger_models.presets import PRESETS, preset
from liger_models.training import loop
from liger_models.training.data import Stream
from liger_models.training.learning_rate import LearningRate
from liger_models.training.loop import Run
from liger_models.training.observing.curves import plot_losses
from liger_models.training.observing.metrics import COLUMNS
from liger_models.training.optimizer import BETAS, build_optimizer
from liger_models.training.processes.world import World


@pytest.fixture
def gradients(start):
    """Function that returns the gradient before clipping, and the loss, of a run's first step."""

    def compute(**changes):
        run = start(clip=0.0, **changes)
        kept = {}
        run.optimizer.step = lambda: kept.update(
            (name, p.grad.clone()) for name, p in run.model.named_parameters()
        )
        outcome = run.step(1e-3, loop.Signals())
        assert outcome.norm == pytest.approx(
            math.sqrt(sum(g.double().square().sum() for g in kept.values())), rel=1e-5
        )
        return kept, outcome.loss

    return compute


@pytest.mark.parametrize(("batch_size", "accumulation"), [(1, 6), (2, 3), (3, 2)])
def test_micro_batches_with_uneven_labels_give_the_gradient_of_one_large_batch(
    gradients, batch_size, accumulation
):
    whole, loss = gradients(batch_size=6, gradient_accumulation=1)
    parts, parts_loss = gradients(batch_size=batch_size, gradient_accumulation=accumulation)
    assert parts_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in whole.items():
        # Sums over 6 * 64 tokens in another order: random errors of 6e-8 * sqrt(384) = 1.2e-6 of the largest
        # entry, and about three times that for the worst of thousands of entries.
        assert (parts[name] - gradient).abs().max() <= 3.6e-6 * gradient.abs().max(), name


def test_the_loss_is_the_mean_over_labels_of_the_models_loss(start):
    run = start(batch_size=6, gradient_accumulation=1)
    rows = Stream(run.documents, 64, run.config.seed).take(6)
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:  # each document alone, without packing
            for piece in row:
                labels = run.documents.labels(piece)
                ids = run.documents.inputs(piece)[None]
                logits = run.model(ids).logits[0]
                total += nn.functional.cross_entropy(logits.double(), labels, reduction="sum").item()
                count += int((labels != -100).sum())
    loss = run.step(1e-3, loop.Signals()).loss
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_the_held_out_loss_is_the_mean_over_all_labels_whatever_the_batch(settings):
    losses = []
    for batch_size in (1, 4):
        config = settings(batch_size=batch_size)
        losses.append(loop.Run(config, loop.World("cpu")).evaluate())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_clipping_scales_the_gradient_to_the_given_norm(start):
    run = start(clip=0.01)
    reported = run.step(1e-3, loop.Signals()).norm
    assert reported > 0.05  # the norm before clipping, or the test would be trivial
    # After one step the first moment is 1 - beta1 times the gradient.
    moments = [run.optimizer.state[p]["exp_avg"] for p in run.parameters]
    norm = math.sqrt(sum(moment.double().square().sum() for moment in moments)) / (1 - BETAS[0])
    assert norm == pytest.approx(0.01, rel=1e-4)


# Values after a quarter of the decay, after half of it, and at its end.
FALLS = {
    "cosine": (0.5 + math.sqrt(0.5) / 2, 0.5, 0.0),
    "linear": (0.75, 0.5, 0.0),
    "wsd": (0.5, 1 - math.sqrt(0.5), 0.0),
    "constant": (1.0, 1.0, 1.0),
}


@pytest.mark.parametrize("schedule", FALLS)
@pytest.mark.parametrize("minimum", [0.0, 0.4])
def test_the_learning_rate_warms_up_linearly_and_decays_by_its_schedule(schedule, minimum):
    start, end = (70, 110) if schedule == "wsd" else (10, 110)
    settings = LearningRate(schedule, 2.0, 110, warmup=10, decay=40, minimum=minimum)
    rates = [settings.rate(step) for step in range(111)]
    assert rates[:10] == pytest.approx([0.2 * (k + 1) for k in range(10)])
    assert rates[10 : start + 1] == [2.0] * (start - 9)
    shares = (start + (end - start) // 4, start + (end - start) // 2, end)
    expected = [minimum + (2.0 - minimum) * left for left in FALLS[schedule]]
    assert [rates[step] for step in shares] == pytest.approx(expected)
    assert all(rate > 0 for rate in rates[:110])


def test_warmup_and_decay_may_be_fractions_of_the_run():
    in_shares = LearningRate("wsd", 1.0, 200, warmup=0.05, decay=0.5)
    in_steps = LearningRate("wsd", 1.0, 200, warmup=10, decay=100)
    assert [in_shares.rate(step) for step in range(200)] == [in_steps.rate(step) for step in range(200)]


def test_a_warmup_longer_than_the_run_is_refused(start):
    with pytest.raises(ConfigError, match="7 steps of warmup in a run of 6 steps"):
        start(warmup=7)
    with pytest.raises(ConfigError, match="4 steps of warmup and 3 of decay in a run of 6 steps"):
        start(warmup=4, schedule="wsd", decay=0.5)


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "sgd"])
def test_weight_decay_applies_to_matrices_only(name):
    taps = ShortConvolution(((1, 3),), 2)
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), taps)
    before = [p.detach().clone() for p in model.parameters()]
    options = {"lr": 0.1, "weight_decay": 0.5, "weights": "plain", "moments": "auto", "seed": 0}
    optimizer = build_optimizer(model, name=name, **options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        factor = 1 - 0.1 * 0.5 if old.ndim == 2 and new is not taps.weight else 1.0
        torch.testing.assert_close(new.detach(), old * factor)


def test_the_loss_decreases_and_is_recorded(run, settings, tmp_path):
    result = run(settings(steps=30, lr=1e-2))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records == result.records
    assert [r["step"] for r in records] == list(range(31))
    assert records[-1]["loss"] < records[1]["loss"] - 0.5
    held = {r["step"]: r["eval_loss"] for r in records if "eval_loss" in r}
    assert list(held) == [0, *range(2, 31, 2)]
    assert held[30] < held[0] - 0.5
    for before, after in itertools.pairwise(records[1:]):
        assert 0 < after["tokens"] - before["tokens"] <= 2 * 64
        assert after["tokens_per_s"] > 0
        assert after["memory"] > 2**20
    with open(tmp_path / "run" / "metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [float(row["loss"]) for row in rows[1:]] == [r["loss"] for r in records[1:]]


def test_the_final_export_is_a_checkpoint_with_its_tokenizer(run, settings, losses):
    import liger_models

    result = run(settings(steps=2))
    names = {path.name for path in result.final.iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert liger_models.from_hub(str(result.final)).num_parameters() > 0


def test_a_preset_takes_vocabulary_and_ids_from_the_tokenizer(
    run, settings, tokenizer_folder, tiny_shape, monkeypatch
):
    monkeypatch.setitem(PRESETS, "tiny", tiny_shape | {"vocab_size": 99999, "eos_token_id": 7})
    with pytest.raises(ConfigError, match="--tokenizer"):
        run(settings(model="tiny"))
    result = run(settings(model="tiny", tokenizer=str(tokenizer_folder), steps=1))
    config = json.loads((result.final / "config.json").read_text())
    assert (config["vocab_size"], config["bos_token_id"], config["eos_token_id"]) == (320, 0, 1)
    assert PRESETS["tiny"]["vocab_size"] == 99999
    assert (result.final / "tokenizer.json").is_file()


def test_the_error_for_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean llama-3\.2-1b"):
        preset("llama-3.2-1")


def test_a_loss_that_is_not_finite_stops_the_run_before_the_weights_change(start, tmp_path):
    run = start()
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    with torch.no_grad():
        run.model.norm.weight[0] = 3e38  # finite, but the logits overflow
    with pytest.raises(TrainingError, match=r"step 1: the loss is (nan|inf)"):
        run.train()
    assert (tmp_path / "run" / "checkpoint-0" / "training_state" / "state.json").is_file()
    for name, parameter in run.model.named_parameters():
        if name != "norm.weight":
            assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "found neither; pass exactly one of steps and epochs"),
        ({"epochs": 1}, "found steps=6 and epochs=1"),
        ({"schedule": "cosinus"}, "'cosinus'; expected one of cosine, linear, wsd, constant"),
        ({"warmup": 1.5}, "warmup is 1.5; expected a whole number of steps, or a share below 1"),
        ({"min_lr": 1.0}, "min_lr is 1.0; expected at most lr"),
        ({"lr": 0.0}, "lr is 0.0; expected a number above 0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"attention": "fast"}, "attention is 'fast'; expected one of auto, sdpa"),
        ({"activation_memory": "leen"}, "activation_memory is 'leen'; expected one of all, lean"),
        ({"seed": 2**63}, "expected a 64-bit integer"),
        ({"steps": None, "epochs": math.inf}, "epochs is inf"),
        ({"seq_len": 0}, "seq_len is 0; expected a whole number of 1 or more"),
        ({"eval_fraction": 1.0}, "eval_fraction is 1.0"),
        ({"eval_data": ("a",)}, "got both eval_data and eval_fraction"),
        ({"data": "a.txt"}, "expected at least one file, as a tuple"),
    ],
)
def test_an_invalid_setting_is_named(settings, changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_a_tokenizer_larger_than_the_model_is_an_error(
    run, settings, tiny_shape, tokenizer_folder, monkeypatch, tmp_path
):
    import liger_models

    liger_models.from_config(
        tiny_shape | {"vocab_size": 100}, dtype=torch.float32, device="cpu"
    ).save_pretrained(tmp_path / "small")
    with pytest.raises(DataError, match="vocabulary has 100 entries"):
        run(settings(model=str(tmp_path / "small"), tokenizer=str(tokenizer_folder)))


TRAIN = """
import json, sys
from liger_models.training import TrainConfig, train
options = json.loads(sys.argv[1])
train(TrainConfig(**options | {key: tuple(options[key]) for key in ("data", "eval_data")}))
"""


def test_documents_longer_than_the_models_positions_are_refused_before_the_first_step(
    run, settings, tmp_path
):
    long, short = tmp_path / "long.txt", tmp_path / "short.jsonl"
    long.write_text("one word after another " * 200)
    short.write_text('{"text": "a few words"}\n' * 40)
    with pytest.raises(ConfigError, match=r"documents of 200 tokens or more.* 128 .*--seq-len 128 or less"):
        run(settings(data=(str(short),), eval_data=(str(long),), eval_fraction=0.0, seq_len=200))
    # Rows may be longer than the number of positions, as long as no document is.
    run(settings(data=(str(short),), seq_len=200, steps=1))


def test_a_float16_checkpoint_asks_for_a_dtype(run, settings, tiny_checkpoint):
    source = str(tiny_checkpoint(torch.float16))
    with pytest.raises(ConfigError, match="choose --dtype bfloat16 or float32"):
        run(settings(model=source))
    run(settings(model=source, dtype="float32", steps=1))


def test_two_ranks_train_like_one_process_with_the_same_batch(run, settings, tmp_path):
    """Two gloo processes (DDP), with half of the rows each, have the same losses and norms."""
    one = run(settings(gradient_accumulation=4, output=str(tmp_path / "one"), save_every=0))
    options = {"output": str(tmp_path / "two"), "save_every": 0, "shard": "none"}
    config = settings(gradient_accumulation=2, **options)
    given = "import liger_models.training", TRAIN, 2, json.dumps(config.to_dict())
    fork = Fork("launch", *given, output=tmp_path / "output")
    ended = fork.wait()
    assert ended == 0, f"{ended}: {fork.output.read_text()}"
    two = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert len(two) == len(one.records) == 7
    for a, b in zip(one.records, two, strict=True):
        for key in ("step", "tokens", "lr", "loss", "grad_norm", "eval_loss"):
            # Rounding of the first sums (1e-7) grows because AdamW divides small gradients by their own size.
            assert a.get(key, 0) == pytest.approx(b.get(key, 0), rel=1e-4), (a["step"], key)


def correction_biases(model):
    return torch.stack([b.clone() for name, b in model.named_buffers() if name.endswith("correction_bias")])


@pytest.mark.parametrize("rate", [0.25, 0.0])
def test_each_step_changes_correction_biases_by_the_rate(rate, start, checkpoint_of_experts):
    run = start(model=str(checkpoint_of_experts), bias_update_rate=rate)
    before = correction_biases(run.model)
    for step in range(2):
        run.step(1e-4, loop.Signals())
        after = correction_biases(run.model)
        moves = (after - before).abs()
        assert set(moves.unique().tolist()) <= {0.0, rate}, step
        assert moves.any() == (rate > 0)
        before = after


def test_correction_biases_are_restored_from_a_checkpoint(run, settings, checkpoint_of_experts, losses):
    options = {
        "model": str(checkpoint_of_experts),
        "bias_update_rate": 0.25,
        "save_every": 1,
        "schedule": "constant",
    }
    whole = run(settings(**options, steps=3))
    run(settings(**options, steps=2, output=str(whole.final.parents[1] / "cut")))
    resumed = run(settings(**options, steps=3, output=str(whole.final.parents[1] / "cut"), resume="auto"))
    biases = [correction_biases(liger_models.from_hub(str(r.final), device="cpu")) for r in (whole, resumed)]
    assert torch.equal(*biases)
    assert biases[0].abs().max() >= 0.25
    assert losses(resumed)[-1] == losses(whole)[-1]


@pytest.mark.parametrize(
    ("extra", "loss", "labels", "scale"),
    [
        ((), 3.0, ["loss (nats per token)", "learning rate", "gradient norm"], "log"),
        (
            ("margin", "accuracy", "chosen_reward", "rejected_reward"),
            -1.0,
            ["loss (nats per token)", "margin", "accuracy", "reward", "learning rate", "gradient norm"],
            "linear",
        ),
    ],
)
def test_curves_have_a_panel_for_each_kind_of_metric(extra, loss, labels, scale, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path: drawn.append(self) or save(self, path))
    records = [
        {"step": step, "loss": loss / step, "lr": 1e-5, "grad_norm": 1.0} | dict.fromkeys(extra, 0.5)
        for step in (1, 2)
    ]
    assert plot_losses(records, tmp_path / "loss.png", extra=extra, title="a model, dpo")
    axes = drawn[0].get_axes()
    assert sorted(one.get_ylabel() for one in axes) == sorted(labels)
    assert axes[0].get_yscale() == scale
    assert drawn[0].get_suptitle() == "a model, dpo"
    rewards = [one for one in axes if one.get_ylabel() == "reward"]
    assert all(len(one.lines) == 2 for one in rewards)


def test_the_curve_is_drawn_only_if_matplotlib_is_installed(tmp_path, monkeypatch):
    records = [
        {"step": 0, "eval_loss": 3.0},
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.0, "eval_loss": 2.5},
    ]
    assert plot_losses(records, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert not plot_losses(records, tmp_path / "none.png")


def test_an_evaluation_uses_no_more_rows_than_requested(settings):
    run = Run(settings(eval_fraction=0.5, eval_tokens=150), World("cpu"))
    everything = Run(settings(eval_fraction=0.5), World("cpu"))
    rows, all_rows = (list(one.evaluation.rows()) for one in (run, everything))
    assert rows == all_rows[:2]  # of 64 tokens
    assert len(all_rows) > 2
    assert run.evaluate()["eval_loss"] != everything.evaluate()["eval_loss"]
