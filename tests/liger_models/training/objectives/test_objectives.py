"""Objectives: each run minimises the objective's definition over whole steps."""

import json
import math
import shutil

import pytest
import torch

import liger_models
from liger_models import losses as of
from liger_models.cli.shared.data_options import OBJECTIVE_OPTIONS
from liger_models.convert.errors import ConfigError
from liger_models.training import TrainConfig, loop
from liger_models.training.data import Stream, groups
from liger_models.training.objectives import OBJECTIVES, options_of
from liger_models.training.observing.metrics import Speeds


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tiny_shape, tokenizer_folder):
    folder = tmp_path_factory.mktemp("teacher") / "model"
    torch.manual_seed(9)
    liger_models.from_config({**tiny_shape, "hidden_size": 48}, device="cpu").save_pretrained(folder)
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


@pytest.fixture
def configured(settings, judged, teacher, data):
    """Factory of a run's settings for an objective."""

    def make(objective, options=None, **changes):
        kind = {"kto": judged["labelled"], "sft": data, "distill": data}.get(objective, judged["pairs"])
        options = ({"teacher": teacher} if objective == "distill" else {}) | dict(options or {})
        defaults = {"eval_fraction": 0.0, "data": (kind,), "seq_len": 96, "steps": 4}
        return settings(objective=objective, objective_options=options, **defaults | changes)

    return make


@pytest.fixture
def start(configured):
    def make(*args, **changes):
        config = configured(*args, **changes)
        return loop.Run(config, loop.World(config.device))

    return make


def sequences(run, rows):
    """Yield each group of these rows as its two (ids, mask of the answer's tokens), and its label."""
    for piece in (piece for row in rows for piece in row):
        corpus, number = run.documents._place(piece)
        cut, good = corpus.groups[number].tolist()
        ids, trained = run.documents.read(*piece)
        yield [(ids[:cut].long(), trained[:cut]), (ids[cut:].long(), trained[cut:])], bool(good)


def log_probs_of(model, ids, counted):
    """Log-probabilities of the counted tokens after the first, and of all tokens, from float64 logits."""
    logits = model(ids[None]).logits[0, :-1].double()
    found = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return found[counted[1:]], found


def expected_of(name, run, reference, rows):
    """Compute an objective's definition and metrics on single sequences, without packing or micro-batches."""
    found = list(sequences(run, rows))
    scored = [[log_probs_of(run.model, *one) for one in two] for two, _ in found]
    with torch.no_grad():
        before = [[log_probs_of(reference, *one) for one in two] for two, _ in found]
    means = torch.stack([torch.stack([one[0].mean() for one in two]) for two in scored])
    if name == "dpo":  # tokens beyond the length of the shorter answer have weight 0.4
        sums, before = (
            torch.stack([torch.stack([shortened(one[0], two, 0.4) for one in two]) for two in both])
            for both in (scored, before)
        )
        nll = -torch.cat([two[0][0] for two in scored]).mean()
        types = {"sigmoid": 0.7, "apo_zero": 0.3, "sft": 0.5}
        return metrics_of(of.dpo_loss(*sums.T, *before.T, beta=0.3, loss_type=types, nll=nll))
    sums, before = (
        torch.stack([torch.stack([one[0].sum() for one in two]) for two in both]) for both in (scored, before)
    )
    if name == "orpo":
        everything = torch.cat([two[0][1] for two in scored])
        return metrics_of(of.orpo_loss(*means.T, -everything.mean(), beta=0.2))
    if name == "simpo":
        answers = torch.cat([two[0][0] for two in scored])
        return metrics_of(of.simpo_loss(*means.T, -answers.mean(), beta=1.5, gamma=0.4, alpha=0.5))
    good = torch.tensor([good for _, good in found])
    kl = of.kto_kl(sums[:, 1].detach(), before[:, 1])
    loss, rewards = of.kto_loss(sums[:, 0], before[:, 0], good, kl, beta=0.3, desirable_weight=0.8)
    return loss, {"kl": kl, "good_reward": rewards[good].mean(), "bad_reward": rewards[~good].mean()}


def metrics_of(result):
    loss, chosen, rejected = result
    wins = (chosen > rejected).double()
    metrics = {"chosen_reward": chosen, "rejected_reward": rejected, "margin": chosen - rejected}
    return loss, {name: x.mean() for name, x in (metrics | {"accuracy": wins}).items()}


def shortened(answer, two, share):
    shorter = min(len(one[0]) for one in two)
    return answer[:shorter].sum() + share * answer[shorter:].sum()


GIVEN = {
    "dpo": {"beta": 0.3, "loss_type": "sigmoid=0.7+apo_zero=0.3+sft=0.5", "desensitize": 0.4},
    "orpo": {"beta": 0.2},
    "simpo": {"beta": 1.5, "margin": 0.4, "nll_weight": 0.5},
    "kto": {"beta": 0.3, "desirable_weight": 0.8},
}


@pytest.mark.parametrize("spared", [0.0, 1.0])
@pytest.mark.parametrize("name", GIVEN)
def test_a_step_has_the_gradient_of_the_definition_over_all_its_micro_batches(
    start, checkpoint, name, spared, monkeypatch
):
    """This holds with prompts computed once, where the objective can do so, and twice."""
    monkeypatch.setattr(groups, "SPARED", spared)
    run = start(name, GIVEN[name], batch_size=2, gradient_accumulation=2, clip=0.0)
    reference = liger_models.from_hub(checkpoint, device="cpu")
    with torch.no_grad():  # so that the policy differs from its reference
        for parameter in run.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    stream = Stream(run.documents, 96, run.config.seed)
    expected, metrics = expected_of(name, run, reference, stream.take(4))
    gradients = torch.autograd.grad(expected, list(run.model.parameters()))
    kept = []
    run.optimizer.step = lambda: kept.extend(p.grad.clone() for p in run.model.parameters())
    outcome = run.step(1e-3, loop.Signals())
    counts = outcome.data.counts
    is_shared = name in ("dpo", "simpo") and spared == 0.0
    assert bool(counts.shared.sum()) is is_shared
    tokens = sum(batch.input_ids.numel() for batch in outcome.data.batches)
    assert tokens == counts.inputs - counts.shared.sum()
    assert outcome.loss == pytest.approx(expected.item(), rel=1e-5)
    for found, wanted in zip(kept, gradients, strict=True):
        # Sums of about 400 tokens with float32's 6e-8, in two layers: 1e-5 of the largest entry.
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert outcome.metrics == {key: pytest.approx(x.item(), rel=1e-4, abs=1e-5) for key, x in metrics.items()}


def test_preference_metrics_are_means_over_the_pairs_of_a_step(start):
    run = start("dpo", {"beta": 0.5}, batch_size=1, gradient_accumulation=3)
    metrics = run.step(1e-2, loop.Signals()).metrics
    assert metrics["margin"] == pytest.approx(0, abs=1e-5)  # the policy is its reference
    for _ in range(3):
        metrics = run.step(1e-2, loop.Signals()).metrics
    assert metrics["margin"] == pytest.approx(metrics["chosen_reward"] - metrics["rejected_reward"], abs=1e-5)
    assert 0 <= metrics["accuracy"] <= 1


def test_distillation_from_the_model_itself_has_no_divergence(start, checkpoint):
    run = start("distill", {"hard_weight": 0.5})
    first = run.step(1e-3, loop.Signals())
    divergence, hard_loss = first.metrics["divergence"], first.metrics["hard_loss"]
    assert divergence > 0.01
    assert first.loss == pytest.approx(divergence + 0.5 * hard_loss, rel=1e-5)
    run.objective.lesson = run.objective._lesson(run.model)
    assert run.step(0.0, loop.Signals()).metrics["divergence"] == pytest.approx(0, abs=1e-6)


def test_dft_weights_each_token_with_its_probability(start):
    plain, dft = start("sft"), start("sft", {"loss_type": "dft"})
    losses = [run.step(1e-3, loop.Signals()).loss for run in (plain, dft)]
    # -p log p is below -log p, and at most 1 / e.
    assert 0 < losses[1] < min(losses[0], 1 / math.e)


@pytest.mark.parametrize("name", ["dpo", "kto", "distill"])  # these cover the state of all objectives
def test_a_resumed_run_gives_the_same_bits(configured, run, losses, tmp_path, cache, teacher, name):
    options = {"output": tmp_path / "run", "save_every": 1, "keep": 0, "steps": 2, "eval_every": 0}
    whole = run(configured(name, **options))
    (tmp_path / "run" / "checkpoint-2").rename(tmp_path / "aside")
    for file in cache.glob("reference-*"):
        file.unlink()  # so that the reference is loaded again
    again = run(configured(name, resume="auto", **options))
    assert losses(whole) == losses(again)
    metrics = [[r.get(n) for n in OBJECTIVES[name].metrics] for r in whole.records]
    assert metrics == [[r.get(n) for n in OBJECTIVES[name].metrics] for r in again.records]
    weights = [liger_models.from_hub(r.final, device="cpu").state_dict() for r in (whole, again)]
    assert all(torch.equal(a, b) for a, b in zip(*(w.values() for w in weights), strict=True))
    if name == "dpo":  # the resumed run would have another model as reference
        with pytest.raises(ConfigError, match="was trained with model="):
            run(configured(name, resume="auto", **options | {"model": teacher, "steps": 3}))


def test_reference_scores_are_cached_by_weights(start, cache, tiny_checkpoint, capsys):
    for file in cache.glob("reference-*"):
        file.unlink()
    run = start("dpo")
    corpus = run.documents.parts[0].corpus
    (kept,) = cache.glob("reference-*")
    assert "taken from" not in capsys.readouterr().err
    for row in Stream(run.documents, 96, 0).take(2):
        for (two, _), place in zip(sequences(run, [row]), run.documents.documents_of([row]), strict=True):
            with torch.no_grad():
                alone = [log_probs_of(run.model, *one)[0].sum() for one in two]
            torch.testing.assert_close(
                corpus.reference[place].double(), torch.stack(alone), rtol=1e-5, atol=1e-5
            )
    start("dpo")
    assert str(kept) in capsys.readouterr().err
    kept.write_bytes(kept.read_bytes()[:-4])  # damaged
    start("dpo")
    assert "taken from" not in capsys.readouterr().err
    other = tiny_checkpoint()
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    start("dpo", model=str(other))
    assert len(list(cache.glob("reference-*"))) == 2


def test_adapters_are_disabled_for_the_reference(configured, run, tmp_path, cache):
    pytest.importorskip("peft")
    options = {"lora": "r=4", "lr": 1e-2, "output": tmp_path / "lora", "save_every": 2, "keep": 0}
    done = run(configured("dpo", **options))
    margins = [r["margin"] for r in done.records]
    assert margins[0] == pytest.approx(0, abs=1e-5)
    assert margins[-1] > 1e-3  # 0 if the reference had the adapters, too
    (tmp_path / "lora" / "checkpoint-4").rename(tmp_path / "aside")
    for file in cache.glob("reference-*"):
        file.unlink()
    again = run(configured("dpo", resume="auto", **options))
    assert [r["margin"] for r in again.records] == margins


# ------------------------------------------------------------------------------------------------ the options


def test_the_command_line_has_the_options_of_all_objectives_and_no_others():
    assert OBJECTIVE_OPTIONS.keys() == {option for name in OBJECTIVES for option in options_of(name)}


@pytest.mark.parametrize(
    ("objective", "options", "says"),
    [
        ("ppo", {}, "expected one of sft"),
        ("sft", {"beta": 0.1}, "sft has no option 'beta'"),
        ("orpo", {"margin": 0.1}, "orpo has no option 'margin'"),
        ("dpo", {"loss_type": "simpo"}, "unknown loss_type"),
        ("dpo", {"label_smoothing": 0.1}, "label_smoothing has no effect"),
        ("dpo", {"loss_type": "sigmoid=0.5+sigmoid"}, "has a type twice"),
        ("dpo", {"beta": 0.0}, "beta is 0.0"),
        ("kto", {"loss_type": "dpo"}, "expected kto"),
        ("distill", {}, "needs a teacher"),
        ("distill", {"teacher": "x", "beta": 1.5}, "beta"),
        ("distill", {"teacher": "x", "hard_weight": -1.0}, "hard_weight is -1.0; expected 0"),
        ("kto", {"desirable_weight": -1.0}, "desirable_weight is -1.0; expected 0"),
        ("reward", {"centering": float("nan")}, "centering is nan; expected 0"),
        ("simpo", {"margin": float("inf")}, "margin is inf; expected a finite number"),
        ("simpo", {"label_smoothing": 2.0}, "label_smoothing is 2.0 with loss_type='sigmoid'"),
        ("distill", {"teacher": "x", "temperature": -1.0, "top_k": 4}, "temperature is -1.0"),
        ("distill", {"teacher": "x", "loss_type": "cosine", "top_k": 4}, "cosine"),
    ],
)
def test_options_that_do_not_apply_are_refused_before_anything_is_loaded(objective, options, says):
    with pytest.raises(ConfigError, match=says):
        TrainConfig("m", ("d",), "o", steps=1, objective=objective, objective_options=options)


def test_a_model_that_does_not_fit_the_objective_is_refused(start, tiny_shape, tokenizer_folder, tmp_path):
    liger_models.from_config(tiny_shape, labels=1, device="cpu").save_pretrained(tmp_path / "rewards")
    for file in tokenizer_folder.iterdir():
        (tmp_path / "rewards" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(
        ConfigError, match="is a sequence classifier, but objective sft trains language models"
    ):
        start("sft", model=str(tmp_path / "rewards"))
    model = liger_models.from_config({**tiny_shape, "is_causal": False}, device="cpu")
    model.save_pretrained(tmp_path / "bidirectional")
    for file in tokenizer_folder.iterdir():
        (tmp_path / "bidirectional" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=r"has bidirectional attention, .* trains causal language models"):
        start("sft", model=str(tmp_path / "bidirectional"))
    with pytest.raises(ConfigError, match="the preset llama-demo has random weights"):
        start("dpo", model="llama-demo", tokenizer=str(tokenizer_folder))


def test_a_teacher_of_another_vocabulary_is_refused(start, teacher, tmp_path):
    shutil.copytree(teacher, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"<|user|>"', '"<|human|>"'))
    with pytest.raises(ConfigError, match=r"has a different vocabulary .*<\|human\|>"):
        start("distill", {"teacher": str(tmp_path / "other")})
    file.unlink()
    with pytest.raises(ConfigError, match=r"other has no tokenizer\.json, so its vocabulary"):
        start("distill", {"teacher": str(tmp_path / "other")})


def test_objective_metrics_appear_in_the_progress_bar():
    speeds = Speeds(peak=1e12, extra=("margin", "accuracy"))
    speeds.add(100, 10**9, 0.5)
    record = {"loss": 0.5, "margin": 0.25, "accuracy": None, "lr": 1e-3, "memory": 2**30}
    assert speeds.line(record, {}).startswith("loss 0.500, margin 0.250, lr 1.0e-03, 200 tok/s")


def test_the_loss_on_held_out_data_in_a_line_says_its_step():
    speeds = Speeds(peak=1e12)
    speeds.add(100, 10**9, 0.5)
    record = {"step": 3, "loss": 0.5, "lr": 1e-3, "memory": 2**30}
    assert speeds.line(record, record | {"eval_loss": 0.25}).endswith("GiB, held-out 0.250")
    assert speeds.line(record, {"step": 2, "eval_loss": 0.25}).endswith("GiB, held-out 0.250 at step 2")
    assert speeds.line(record, {"step": 2, "eval_loss": None}).endswith("GiB")


def test_objective_metrics_appear_in_the_files_and_the_plot(configured, run, curves):
    done = run(configured("dpo", eval_fraction=0.2))
    header, *lines = (done.final.parent / "metrics.csv").read_text().splitlines()
    assert {"margin", "accuracy", "eval_margin"} <= set(header.split(","))
    assert "eval_accuracy" in json.loads((done.final.parent / "metrics.jsonl").read_text().splitlines()[-1])
    assert len(lines) == len(done.records)
    assert (done.final.parent / "loss.png").stat().st_size > 20_000


# ---------------------------------------------------------------------------------------------------- rewards


def rewards_of(model, run, rows):
    """Rewards of each sequence by itself, [groups, 2]."""
    two = [[model(ids[None]).logits[0, 0] for ids, _ in both] for both, _ in sequences(run, rows)]
    return torch.stack([torch.stack(both) for both in two])


def test_a_reward_step_minimises_the_bradley_terry_loss_over_all_pairs(start):
    run = start("reward", {"margin": 0.2, "centering": 0.1}, gradient_accumulation=3, clip=0.0)
    with torch.no_grad():
        run.model.lm_head.weight.mul_(30)  # since a fresh head gives rewards near zero
    rows = Stream(run.documents, 96, run.config.seed).take(3)
    rewards = rewards_of(run.model, run, rows)
    expected = of.reward_loss(*rewards.T, torch.tensor(0.2), centering=0.1).loss
    gradients = torch.autograd.grad(expected, list(run.model.parameters()))
    kept = []
    run.optimizer.step = lambda: kept.extend(p.grad.clone() for p in run.model.parameters())
    outcome = run.step(1e-3, loop.Signals())
    assert outcome.loss == pytest.approx(expected.item(), rel=1e-5)
    assert outcome.metrics["accuracy"] == pytest.approx((rewards[:, 0] > rewards[:, 1]).float().mean().item())
    for found, wanted in zip(kept, gradients, strict=True):
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()  # as above


@pytest.mark.parametrize("lora", [None, "r=4"])
def test_trained_rewards_match_transformers(configured, run, checkpoint, tmp_path, lora):
    transformers = pytest.importorskip("transformers")
    options = {"lora": lora, "merge": lora is not None, "lr": 1e-2, "steps": 2, "save_every": 1, "keep": 0}
    done = run(configured("reward", **options))
    (done.final.parent / "checkpoint-2").rename(tmp_path / "aside")
    again = run(configured("reward", resume="auto", **options))
    assert [r["loss"] for r in again.records] == [r["loss"] for r in done.records]
    auto = transformers.AutoModelForSequenceClassification
    if lora:
        peft = pytest.importorskip("peft")
        theirs = peft.PeftModel.from_pretrained(auto.from_pretrained(checkpoint, num_labels=1), done.final)
        ours = liger_models.from_hub(done.final.parent / "merged", device="cpu")
    else:
        theirs, ours = auto.from_pretrained(done.final), liger_models.from_hub(done.final, device="cpu")
    ids = torch.randint(5, 320, (1, 12))
    with torch.no_grad():
        found, expected = ours.eval()(ids).logits, theirs.eval()(input_ids=ids).logits
    assert found.shape == (1, 1)
    assert abs(found - expected).item() <= 1e-5 * expected.abs().item()
