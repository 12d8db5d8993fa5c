"""TRL's trainers train our models with the same numbers as transformers' own.

Every case trains both for two steps with the same trainer, seeds and data, and compares the loss of each
batch and the change of every parameter, by the names of the checkpoint.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from hf_pairs import BOUND, relative_distance
from pairs import spec_of
from representatives import representatives
from safetensors.torch import load_file
from torch import Tensor

from liger_models.architectures import find_architecture, list_architectures
from liger_models.convert.errors import UnsupportedModelError
from liger_models.layers.recompute import tiles

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets, which trl requires, is not installed")

SETTINGS = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.3,  # parameters change by percents, far more than rounding
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
}

# Assistant tokens are marked, as in templates for assistant-only loss.
CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}:{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """Tokenizer with one token per letter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {chr(i): i for i in range(3, 128)} | {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT,
        padding_side="left",
    )


KEYS_OF_HEADS = {
    "final_logit_softcapping",
    "logit_scale",
    "output_multiplier",
    "lm_head_multiplier",
    "logits_scaling",
}
# With TRL's fused head, transformers' own classes of these compute other logits, and ours refuse it.
OTHER_LOGITS = {
    "inkling_text": "never predicted",
    "modernbert-decoder": "layers of the head",
    "recurrent_gemma": "cap of the logits",
}

TEXTS = [{"text": "some words " * (1 + i % 3)} for i in range(16)]
ANSWERS = [{"prompt": "hello" + "x" * i, "completion": "answer" + "y" * (3 * i)} for i in range(8)]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": "ab" * (1 + i % 3)},
            {"role": "assistant", "content": "yes" * (1 + i % 2)},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "no" * (1 + i % 4)},
        ]
    }
    for i in range(8)
]
CHOICES = [
    {"prompt": "abc" + "d" * i, "chosen": "good " * (1 + i % 2), "rejected": "bad " * (1 + i % 3)}
    for i in range(8)
]
JUDGED = [
    {"prompt": "abc" + "d" * i, "completion": "word " * (1 + i % 3), "label": i % 2 == 0} for i in range(8)
]
PROMPTS = [{"prompt": "abc" + "d" * i} for i in range(8)]


def size_of_letters(completions, **_):
    """Reward that differs between nearly all completions."""
    return [sum(map(ord, text)) / 100 for text in completions]


class Case(NamedTuple):
    """TRL trainer with its data and options. `arguments`: further trainer arguments."""

    trainer: str
    rows: list[dict[str, Any]]
    options: Mapping[str, Any] = {}
    arguments: Mapping[str, Any] = {}
    with_teacher: bool = False
    task: str = "CausalLM"


SAMPLED = {"max_completion_length": 5, "num_generations": 4, "beta": 0.1, "temperature": 0.8}
REWARD = {"reward_funcs": size_of_letters}
CASES = {
    "sft": Case("SFT", TEXTS),
    "completions": Case("SFT", ANSWERS),
    "bfd": Case("SFT", TEXTS, {"packing": True, "max_length": 32}),
    "wrapped": Case("SFT", TEXTS, {"packing": True, "packing_strategy": "wrapped", "max_length": 32}),
    "padding_free": Case("SFT", ANSWERS, {"padding_free": True, "max_length": None}),
    "assistant": Case("SFT", CHATS, {"assistant_only_loss": True}),
    "dpo": Case("DPO", CHOICES),
    "kto": Case("KTO", JUDGED),
    "orpo": Case("ORPO", CHOICES, {"max_length": 32}),
    "cpo": Case("CPO", CHOICES, {"max_length": 32}),
    "grpo": Case("GRPO", PROMPTS, SAMPLED, REWARD),
    "rloo": Case("RLOO", PROMPTS, SAMPLED, REWARD),
    "reward": Case("Reward", CHOICES, task="SequenceClassification"),
    "distillation": Case("Distillation", PROMPTS, {"max_completion_length": 5}, with_teacher=True),
    "gkd": Case("GKD", CHATS, {"max_new_tokens": 5, "lmbda": 0.5}, with_teacher=True),
}


@pytest.mark.supports(
    "TRL",
    "SFT",
    "completion-only loss",
    "packing, bfd and wrapped",
    "padding_free",
    "assistant-only loss",
    "DPO",
    "KTO",
    "ORPO",
    "CPO",
    "GRPO",
    "RLOO",
    "Reward",
    "Distillation",
    "GKD",
    "most of these with PEFT",
)
@pytest.mark.parametrize(
    ("way", "adapted"),
    [
        pytest.param(way, adapted, id=f"{way}-{'peft' if adapted else 'whole'}")
        for i, way in enumerate(CASES)
        for adapted in (False, True)
        if way in ("sft", "dpo", "grpo", "reward") or i % 2 == adapted
    ],
)
def test_training_equals_training_of_transformers_own_model(way, adapted, train_both):
    assert_same_training(*train_both("llama", CASES[way], adapted, tie_word_embeddings=not adapted))


# Options that make the trainers call the model in other ways.
OPTIONS = {
    "label_smoothing": ("sft", {"label_smoothing_factor": 0.1}),
    "neftune": ("sft", {"neftune_noise_alpha": 5.0}),
    "several_losses": ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "reference_in_advance": ("dpo", {"precompute_ref_log_probs": True}),
    "documents": ("dpo", {"padding_free": True}),
    "several_iterations": ("grpo", {"loss_type": "dapo", "num_iterations": 2, "steps_per_generation": 2}),
    "float32_head": ("grpo", {"cast_lm_head_to_fp32": True}),
}


@pytest.mark.supports("TRL", "DPO with padding_free", "GRPO with several iterations", "cast_lm_head_to_fp32")
@pytest.mark.parametrize("option", OPTIONS)
def test_training_with_options_matches_the_reference_too(option, train_both):
    way, settings = OPTIONS[option]
    case = CASES[way]
    assert_same_training(*train_both("llama", case._replace(options={**case.options, **settings})))


def test_selective_checkpointing_is_refused(make_both, tokenizer, tmp_path):
    model = make_both("llama", pad_token_id=0, eos_token_id=1).ours
    selective = {"gradient_checkpointing_kwargs": {"selective": True}}
    trainer = make_trainer(CASES["sft"]._replace(options=selective), model, tokenizer, tmp_path)
    with pytest.raises(ValueError, match="only use_reentrant, preserve_rng_state, every_n_layers"):
        trainer.train()


@pytest.mark.parametrize("way", ["dpo", "grpo"])
def test_a_pass_of_the_reference_model_keeps_the_activation_memory_levels(
    way, make_both, tokenizer, tmp_path, monkeypatch
):
    """TRL disables and enables checkpointing around the reference's pass.

    The batch has more tokens than a tile, so that layers that ran in tiles must do so again in the backward
    pass.
    """
    monkeypatch.setattr(tiles, "TILE", 8)
    model = make_both("llama", projections="split", pad_token_id=0, eos_token_id=1).ours
    model.set_activation_memory(levels := ("tiled", "lean", "offload")[-len(model.activation_memory) :])
    case = CASES[way]._replace(options={**CASES[way].options, "gradient_checkpointing": False})
    adapter = peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    passes, choose = [], type(model).gradient_checkpointing_disable
    monkeypatch.setattr(
        type(model), "gradient_checkpointing_disable", lambda model: (passes.append(1), choose(model))[1]
    )
    make_trainer(case, model, tokenizer, tmp_path, peft_config=adapter).train()
    assert passes
    assert model.activation_memory == levels


# Families with capped logits, and with router losses, which TRL's trainers request by default.
@pytest.mark.supports("TRL", "capped logits", "router losses")
@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(("gemma2", way) for way in ("completions", "dpo", "grpo")),
        *(("qwen3_moe", way) for way in ("bfd", "dpo", "grpo")),
        *(("deepseek_v4", way) for way in ("completions", "dpo")),
        *(("hy_v4", way) for way in ("bfd", "dpo")),
        *(("qwen4_exp_text", way) for way in ("completions", "dpo")),
        *(("gemma3n_text", way) for way in ("bfd", "dpo")),
        ("codegen", "bfd"),
    ],
)
def test_training_of_other_families_matches_the_reference_too(family, way, train_both):
    case = CASES[way]
    # TRL 1.16 computes no router losses of configs without num_experts.
    if family in ("deepseek_v4", "hy_v4", "qwen4_exp_text"):
        case = case._replace(options={**case.options, "router_aux_loss_coef": 0.0})
    found, expected = train_both(family, case)
    assert_same_training(found, expected)


@pytest.mark.supports("TRL", "shared prompts in GRPO, RLOO and DPO")
@pytest.mark.parametrize(
    ("way", "adapted"), [("grpo", True), ("rloo", False), ("dpo", False), ("dpo", True)], ids=str
)
def test_training_with_shared_prompts_equals_trls_own(
    way, adapted, make_both, tokenizer, tmp_path, monkeypatch
):
    from liger_models.hf import shared_prompts as shared

    shares, score = [], shared.shared_prompts

    def noted(items):
        items = list(items)
        shares.append(max(len(answers) for _, answers in items))
        return score(items)

    monkeypatch.setattr(shared, "shared_prompts", noted)
    config = {"pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": not adapted}
    both = make_both("llama", "CausalLM", "split" if adapted else "fused", **config)
    again = type(both.ours).from_pretrained(both.folder)
    if adapted:
        again.split_projections()
    case = CASES[way]._replace(options={**CASES[way].options, "seed": 3})
    expected = run(case, both.ours, tokenizer, tmp_path / "theirs", adapted)
    assert not shares
    found = run(case, again, tokenizer, tmp_path / "shared", adapted, (shared.SharedPromptsMixin,))
    assert max(shares) >= 2
    # RLOO's advantages are differences of rewards, here up to 10, which multiply ratios with the rounding of
    # five log-probabilities of about 4: 10 * 5 * 4 * 2^-24.
    assert_same_training(found, expected, least=1.2e-5)


@pytest.mark.supports("TRL", "evaluation and compute_metrics")
def test_evaluation_equals_evaluation_of_transformers_own_model(make_both, tokenizer, tmp_path):
    both = make_both("gemma2", pad_token_id=0, eos_token_id=1)
    data, metrics = datasets.Dataset.from_list(ANSWERS), []
    for model in (both.ours, both.reference):
        more = {
            "eval_dataset": data,
            "compute_metrics": lambda given: {"sum": float(given.predictions.sum())},
        }
        metrics.append(make_trainer(CASES["completions"], model, tokenizer, tmp_path, **more).evaluate())
    found, expected = metrics
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=BOUND)
    assert found["eval_mean_token_accuracy"] == expected["eval_mean_token_accuracy"]
    assert found["eval_entropy"] == pytest.approx(expected["eval_entropy"], rel=BOUND)
    assert "eval_sum" in found  # no comparison: our logits at padding are zeros


@pytest.mark.supports("TRL", "add_fused_lm_head on every kind of head")
def test_trls_fused_head_scores_our_hidden_states_like_our_own_head(hf, batch):
    """TRL reads the scale and cap of logits from certain config keys. Tested are families with such a key or
    such a head, and some with every other form of a head.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from trl.trainer import add_fused_lm_head

    distances, heads = {}, representatives("head")
    for family in set(list_architectures()) & set(CONFIG_MAPPING):
        spec, tiny = spec_of(family), find_architecture(family).tiny
        read = KEYS_OF_HEADS & {*CONFIG_MAPPING[family]().to_dict(), *tiny}
        if not read and spec.logit_scale == 1 and not spec.logit_softcap and family not in heads:
            continue
        config = transformers.AutoConfig.for_model(**{"pad_token_id": None, **find_architecture(family).tiny})
        model = hf.classes_of(family).causal_lm(config).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.3)
        expected = model(**batch).loss
        if family in OTHER_LOGITS:
            with pytest.raises(UnsupportedModelError, match=OTHER_LOGITS[family]):
                add_fused_lm_head(model)
            assert torch.equal(model(**batch).loss, expected)
            continue
        add_fused_lm_head(model)
        distances[family] = relative_distance(model(**batch, fused_lm_head=True).loss, expected)
    assert len(distances) > 20
    assert not {family: distance for family, distance in distances.items() if not distance <= BOUND}


@pytest.mark.supports("TRL", "models given as strings")
def test_a_string_creates_our_model_and_our_reference_model_once_registered(
    make_both, tokenizer, tmp_path, hf
):
    both = make_both("llama", pad_token_id=0, eos_token_id=1)
    trainer = make_trainer(CASES["dpo"], str(both.folder), tokenizer, tmp_path)
    assert type(trainer.model) is type(trainer.ref_model) is type(both.ours)
    hf.unregister()
    trainer = make_trainer(CASES["dpo"], str(both.folder), tokenizer, tmp_path)
    assert type(trainer.model) is type(trainer.ref_model) is type(both.reference)


class Run(NamedTuple):
    """Batch losses, and checkpoint or adapter tensors before and after training."""

    losses: list[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


@pytest.fixture
def train_both(make_both, tokenizer, tmp_path, hf):
    """Factory of (run of our model, run of transformers' own)."""

    def train(family, case, adapted=False, **config):
        config |= {"pad_token_id": 0, "eos_token_id": 1}
        if case.task == "SequenceClassification":
            config["num_labels"] = 1
        both = make_both(family, case.task, "split" if adapted else "fused", **config)
        found = run(case, both.ours, tokenizer, tmp_path / "ours", adapted)
        hf.unregister()  # the trainer's reference model is also looked up by name
        reference = type(both.reference).from_pretrained(both.folder, attn_implementation="eager")
        return found, run(case, reference, tokenizer, tmp_path / "theirs", adapted)

    return train


def run(case, model, tokenizer, folder, adapted, mixins=()) -> Run:
    more = {"mixins": mixins}
    if adapted:
        task = "CAUSAL_LM" if case.task == "CausalLM" else "SEQ_CLS"
        more["peft_config"] = peft.LoraConfig(r=3, target_modules="all-linear", task_type=task)
    if case.with_teacher:
        more["teacher_model"] = with_other_words(model)
    trainer = make_trainer(case, model, tokenizer, folder / "run", **more)
    if adapted:
        randomize(trainer.model)
    losses, training_step = [], trainer.training_step

    def noted(*args, **kwargs):
        losses.append(training_step(*args, **kwargs))
        return losses[-1]

    trainer.training_step = noted
    before = saved(trainer.model, folder / "before")
    trainer.train()
    return Run([loss.item() for loss in losses], before, saved(trainer.model, folder / "after"))


def make_trainer(case, model, tokenizer, folder, mixins=(), **more):
    arguments = find(case.trainer, "Config")(str(folder), **{**SETTINGS, **case.options})
    trainer = type("Trainer", (*mixins, find(case.trainer, "Trainer")), {})
    return trainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(case.rows),
        processing_class=tokenizer,
        **case.arguments,
        **more,
    )


def find(method, kind):
    """Find a TRL class, including experimental ones."""
    home = (
        trl if hasattr(trl, method + kind) else importlib.import_module(f"trl.experimental.{method.lower()}")
    )
    return getattr(home, method + kind)


def with_other_words(model):
    """Make a teacher: the model before training, with permuted embeddings."""
    teacher = copy.deepcopy(model).eval()
    embeddings = teacher.get_input_embeddings().weight
    with torch.no_grad():
        embeddings.copy_(embeddings.roll(7, 0))
    return teacher


def randomize(adapted):
    """Randomise adapters: one that starts at zero has no gradient for one factor in the first step."""
    generator = torch.Generator().manual_seed(3)
    state = peft.get_peft_model_state_dict(adapted)
    drawn = {name: torch.randn(state[name].shape, generator=generator) for name in sorted(state)}
    peft.set_peft_model_state_dict(adapted, {name: 0.3 * x / x.shape[-1] ** 0.5 for name, x in drawn.items()})


def saved(model, folder) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    name = "adapter_model" if isinstance(model, peft.PeftModel) else "model"
    return load_file(folder / f"{name}.safetensors")


def assert_same_training(found: Run, expected: Run, least: float = 1e-6) -> None:
    # Where terms of about one cancel (GRPO, RLOO), their rounding remains.
    assert found.losses == pytest.approx(expected.losses, rel=BOUND, abs=least)
    assert found.after.keys() == expected.after.keys()
    changed = 0
    for name, after in expected.after.items():
        if not after.is_floating_point():  # a table of experts
            assert torch.equal(found.after[name], after), name
            continue
        change = (after - expected.before[name]).norm()
        changed += bool(change > 1e-3 * after.norm())
        # The bound of the gradients, plus two updates that round a parameter by half an ulp each.
        assert (found.after[name] - after).norm() <= BOUND * change + 2**-23 * after.norm(), name
    assert changed > len(expected.after) / 2  # by far more than rounding
