"""Runs of GRPO: samples, rewards, the published losses, and resuming."""

import json
from dataclasses import replace

import pytest
import torch

import liger_models
from liger_models.convert.errors import ConfigError, DataError
from liger_models.losses import PolicyOptions, group_advantages, grpo_loss
from liger_models.training import train
from liger_models.training.data.prompts import Prompts
from liger_models.training.data.stream import START
from liger_models.training.objectives import make_objective
from liger_models.training.sampling import judge, load_reward
from liger_models.training.text.tokenizer import TextTokenizer

REWARDS = """
def early(prompts, completions, letter, **others):
    assert len(prompts) == len(completions) == len(letter)
    return [sum(c in l for c in text) / 24 for text, l in zip(completions, letter)]

def short(completions, **others):
    return [None if not text else 0.0 for text in completions]

def few(completions, **others):
    return [1.0]
"""


@pytest.fixture
def run_of(settings_for, jsonl, tmp_path):
    """Factory of the settings of a GRPO run; keywords replace settings, `options` those of the objective."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    records = [{"question": text, "letter": "ab"} for text in ("ab c", "de", "f g h", "ij")]
    records += [{"question": [{"role": "user", "content": "ab"}], "letter": "ab"}]
    data = jsonl(tmp_path / "prompts.jsonl", records)

    def make(name, options=(), **changes):
        objective = {"reward": f"{tmp_path}/rewards.py:early", "max_new_tokens": 8, **dict(options)}
        changes = {
            "lr": 1e-2,
            "steps": 4,
            "batch_size": 2,
            "weight_decay": 0.0,
            "gradient_accumulation": 1,
            **changes,
        }
        return replace(
            settings_for(tmp_path / name),
            **{
                "data": (data,),
                "columns": "prompt=question",
                "eval_fraction": 0.0,
                "eval_data": (),
                **changes,
            },
            **{"objective": "grpo", "objective_options": objective, "epochs": None},
        )

    return make


def samples_of(config):
    return [json.loads(line) for line in open(f"{config.output}/completions.jsonl")]


def test_the_reward_increases(run_of):
    config = run_of("run", {"group_size": 8}, steps=16, batch_size=2)
    rewards = [record["reward"] for record in train(config).records]
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])
    samples = samples_of(config)
    assert len(samples) == 16 * 2 * 8
    first = [sample for sample in samples if sample["step"] == 1]
    assert sum(sample["reward"] for sample in first) / 16 == pytest.approx(rewards[0], rel=1e-5)
    assert abs(sum(sample["advantage"] for sample in first[:8])) < 1e-4


def test_a_resumed_run_samples_the_same_answers(run_of):
    whole = run_of("whole", {"group_size": 2, "updates": 2}, save_every=2, keep=0, steps=4)
    records = train(whole).records
    resumed = replace(whole, output=whole.output + "2", resume=f"{whole.output}/checkpoint-2")
    again = train(resumed).records
    assert samples_of(resumed) == [sample for sample in samples_of(whole) if sample["step"] > 2]
    assert [record["loss"] for record in again[-2:]] == [record["loss"] for record in records[-2:]]
    assert {sample["step"] for sample in samples_of(whole)} == {1, 3}


@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "gspo", "gmpo"])
def test_micro_batches_have_the_loss_and_gradients_of_separate_sequences(
    tiny_shape, tokenizer_folder, jsonl, tmp_path, kind
):
    torch.manual_seed(0)
    model, reference = (liger_models.from_config(tiny_shape, device="cpu") for _ in range(2))
    tokenizer = TextTokenizer(tokenizer_folder)
    data = jsonl(tmp_path / "a.jsonl", [{"prompt": text} for text in ("ab c", "d", "e f g h", "ij")])
    options = {
        "reward": "none",
        "loss_type": kind,
        "group_size": 3,
        "max_new_tokens": 6,
        "updates": 2,
        "beta": 0.3,
    }
    objective = make_objective("grpo", options)
    objective.tokenizer, objective.teacher = tokenizer, reference
    rewards = torch.randn(12)
    objective.judge = lambda *about: rewards[:, None]
    step = next(Prompts([data], tokenizer, longest=20).steps(START, 0, 2, 2, 3, 2))
    before = [p.detach().clone() for p in model.parameters()]
    objective.begin_step(model, ((batch, True) for batch in step.batches), torch.device("cpu"))
    with torch.no_grad():  # the second update, in which ratios differ from one and some are clipped
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    shares = [objective.share(model, batch, step.counts) for batch in step.batches]
    sum(share.loss for share in shares).backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    sequences = []
    for batch in step.batches:
        packed = batch.samples.packed
        labels = packed["labels"][0].tolist()
        answers = [labels[start + 1 : start + 1 + length] for start, length in packed.answers]
        sequences += [(batch.prompts[k // 3].ids, answer) for k, answer in enumerate(answers)]
    width = max(len(prompt) + len(answer) for prompt, answer in sequences)
    ids = torch.tensor([p + a + [0] * (width - len(p) - len(a)) for p, a in sequences])
    labels = torch.tensor([[-100] * len(p) + a + [-100] * (width - len(p) - len(a)) for p, a in sequences])
    mask = torch.tensor([[1] * (len(p) + len(a)) + [0] * (width - len(p) - len(a)) for p, a in sequences])
    counted = labels[:, 1:] != -100

    def scores(of):
        return of.score(ids, labels, attention_mask=mask).log_probs

    log_probs = scores(model)
    with torch.no_grad():
        theirs = scores(reference)
        now = [p.clone() for p in model.parameters()]
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
        old = scores(model)
        for parameter, value in zip(model.parameters(), now, strict=True):
            parameter.copy_(value)
    about = {
        "beta": 0.3,
        "high": 5.0 if kind == "cispo" else None,
        "length": 6 if kind == "dr_grpo" else None,
    }
    level = {"loss_type": "grpo", "level": "sequence"} if kind == "gspo" else {"loss_type": kind}
    advantages = group_advantages(rewards, 3, "none" if kind == "dr_grpo" else "group")
    wanted = grpo_loss(
        log_probs, advantages, counted, PolicyOptions(**level, **about), old_log_probs=old, reference=theirs
    )
    # Different sums of the same float32 terms of about 1: 1e-5 is about a hundred roundings.
    assert sum(share.loss.item() for share in shares) == pytest.approx(wanted.loss.item(), abs=1e-5)
    # Compute the scores again: `copy_` invalidated the graph of log_probs.
    grpo_loss(
        scores(model),
        advantages,
        counted,
        PolicyOptions(**level, **about),
        old_log_probs=old,
        reference=theirs,
    ).loss.backward()
    for mine, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=2e-5)


def test_unusable_settings_are_refused(run_of, tmp_path):
    file = tmp_path / "rewards.py"
    for make, message in (
        (lambda: run_of("a", {"reward": ""}), "grpo needs a reward"),
        (lambda: run_of("a", {"reward": f"{file}:none"}), "has no function 'none'"),
        (
            lambda: run_of("a", {"reward": "nowhere.py:f"}),
            "expected FILE.py:FUNCTION with a file that exists",
        ),
        (lambda: run_of("a", {"reward": f"{file}:few"}), "returned 1 values for 16 completions"),
        (lambda: run_of("a", {"beta": 0.1}), "pass --reference MODEL, or train with --lora"),
        (lambda: run_of("a", eval_fraction=0.1), "has no held-out data"),
        (lambda: run_of("a", sample_prompts="a"), "writes its samples to completions.jsonl"),
        (lambda: run_of("a", {"group_size": 1}), "group_size is 1; expected 2 or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(make())
    with pytest.raises(
        DataError, match=r"prompts\.jsonl, line 1: the prompt has \d+ tokens; expected 1 to 2,"
    ):
        train(run_of("b", {"max_new_tokens": 62}))
    found = judge([load_reward(f"{file}:short")], ["p", "q"], ["", "x"], [{}, {}])
    assert found.isnan().tolist() == [[True], [False]]
