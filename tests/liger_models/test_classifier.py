"""Sequence classifiers match transformers' classes in numbers and files."""

from contextlib import nullcontext

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture
from liger_models.cli import main
from liger_models.convert.errors import ConfigError, DataError, UnsupportedModelError
from liger_models.models.classifier import LigerSequenceClassifier

transformers = pytest.importorskip("transformers")
PAD = 3


def config_of(family, **changes):
    tiny = {key: value for key, value in find_architecture(family).tiny.items() if value is not ...}
    return {**tiny, "pad_token_id": PAD, **changes}


def randomised(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def padded(vocab_size):
    """Rows of 9, 5 and 1 tokens without padding tokens inside."""
    ids = torch.randint(PAD + 1, vocab_size, (3, 9))
    mask = torch.arange(9) < torch.tensor([[9], [5], [1]])
    return ids.masked_fill(~mask, PAD), mask.long()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_rewards_and_files_match_transformers(family, tmp_path):
    torch.manual_seed(0)
    causal = randomised(liger_models.from_config(config_of(family), device="cpu"))
    causal.save_pretrained(tmp_path / "causal")
    ours = randomised(liger_models.from_hub(tmp_path / "causal", labels=2, device="cpu"))
    assert isinstance(ours, LigerSequenceClassifier)
    ours.save_pretrained(tmp_path / "ours")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    assert type(theirs).__name__ == ours.architecture.reference
    ids, mask = padded(ours.spec.vocab_size)
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask).logits
        found = ours(ids, attention_mask=mask).logits
        again = liger_models.from_hub(tmp_path / "ours", device="cpu").eval()(ids, attention_mask=mask).logits
        rows = [ids[i, :n] for i, n in enumerate(mask.sum(1))]
        bounds = torch.tensor([0, 9, 14, 15], dtype=torch.int32)
        packed = ours(torch.cat(rows)[None], cu_seqlens=bounds).logits
        states = theirs.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        values = theirs.score(states) * mask[..., None]
        of_tokens = ours(ids, attention_mask=mask, every_token=True).logits
        in_one_row = ours(torch.cat(rows)[None], cu_seqlens=bounds, every_token=True).logits
        unmasked = ours(ids).logits  # the padding token marks the end of a sequence
    assert torch.equal(found, again)
    # The usual float32 bound: 1e-5 of the largest element.
    for other in (found, packed, unmasked):
        assert (other - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (of_tokens - values).abs().max() <= 1e-5 * values.abs().max()
    assert (in_one_row[0] - values[mask.bool()]).abs().max() <= 1e-5 * values.abs().max()
    theirs.save_pretrained(tmp_path / "theirs")
    back = liger_models.from_hub(tmp_path / "theirs", device="cpu")
    back.save_pretrained(tmp_path / "back")
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("theirs", "back"))
    assert a == b


def test_the_body_comes_from_the_language_model_and_the_head_is_fresh(tmp_path):
    causal = randomised(liger_models.from_config(config_of("llama"), device="cpu", dtype="bfloat16"))
    causal.save_pretrained(tmp_path)
    torch.manual_seed(5)
    one = liger_models.from_hub(tmp_path, labels=1, device="cpu")
    torch.manual_seed(5)
    other = liger_models.from_hub(tmp_path, labels=1, device="cpu")
    assert torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.lm_head.weight.shape == (1, causal.spec.hidden_size)
    assert one.lm_head.weight.dtype == torch.bfloat16
    assert 0 < one.lm_head.weight.float().std() < 3 * causal.spec.initializer_range
    expected = causal.state_dict()
    for name, tensor in one.state_dict().items():
        if not name.startswith("lm_head."):
            assert torch.equal(tensor, expected[name]), name


def test_calls_without_labels_or_tokens_are_refused(tmp_path, capsys):
    model = liger_models.from_config(config_of("llama"), labels=2, device="cpu")
    with pytest.raises(UnsupportedModelError, match="it has no distribution of tokens"):
        model.generate(torch.tensor([[4]]))
    model.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "every byte the same" in printed
    assert "not compared with transformers: only language models are compared" in printed
    with pytest.raises(ConfigError, match="labels is 1; expected 2"):
        liger_models.from_hub(tmp_path, labels=1, device="cpu")
    with pytest.raises(UnsupportedModelError, match="expected a text-only family"):
        liger_models.from_config(find_architecture("gemma3").tiny, labels=1, device="meta")


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """(ours, theirs) with one label, and with three."""
    folder, pairs = tmp_path_factory.mktemp("classifiers"), {}
    for count in (1, 3):
        torch.manual_seed(count)
        ours = randomised(liger_models.from_config(config_of("llama"), labels=count, device="cpu"))
        ours.save_pretrained(folder / str(count))
        pairs[count] = (
            ours,
            transformers.AutoModelForSequenceClassification.from_pretrained(folder / str(count)),
        )
    return pairs


LABELS = {  # labels of three sequences, and the problem that they mean where the config states none
    "numbers": (1, torch.tensor([0.5, -1.0, 2.0]), "regression"),
    "integers for one label": (1, torch.tensor([[1], [0], [4]]), "regression"),
    "several numbers": (3, torch.tensor([[0.5, -1, 2], [0, 3, 1], [1, 1, -2.0]]), "regression"),
    "classes": (3, torch.tensor([2, 0, 1]), "single_label_classification"),
    "classes, some ignored": (3, torch.tensor([2, -100, 1]), "single_label_classification"),
    "several classes": (3, torch.tensor([[1.0, 0, 1], [0, 0, 1], [0.0, 1, 1]]), "multi_label_classification"),
}


@pytest.mark.parametrize("case", LABELS)
def test_losses_of_labels_match_transformers(case, classifiers):
    count, labels, problem = LABELS[case]
    ours, theirs = classifiers[count]
    for model in (ours, theirs):
        model.config.problem_type = "regression" if case == "several numbers" else None
        model.zero_grad()
    ids, mask = padded(ours.spec.vocab_size)
    call = {"attention_mask": mask, "return_dict": False}
    loss, logits = ours(ids, labels=labels, **call)
    assert ours.config.problem_type == problem
    expected = theirs(ids, labels=labels if problem.startswith("single") else labels.float(), **call)[0]
    # float32: the logits differ by 1e-5 of the largest, and the loss by 1e-6 of itself where they do not
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    formula = transformers.loss.loss_utils.ForSequenceClassificationLoss
    same = formula(labels if problem.startswith("single") else labels.float(), logits, theirs.config)
    assert loss.item() == pytest.approx(same.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    found, truth = ours.lm_head.weight.grad, theirs.score.weight.grad
    assert (found - truth).abs().max() <= 1e-5 * truth.abs().max()
    counted = labels.numel() - (labels == -100).sum()
    parts = [  # micro-batches add up to the batch
        ours(ids[s], attention_mask=mask[s], labels=labels[s], num_items_in_batch=counted).loss
        for s in (slice(0, 1), slice(1, 3))
    ]
    assert sum(parts).item() == pytest.approx(loss.item(), rel=1e-5)


def test_hidden_states_of_a_classifier_match_transformers(classifiers):
    ours, theirs = classifiers[3]
    ids, mask = padded(ours.spec.vocab_size)
    found, expected = (
        m(ids, attention_mask=mask, output_hidden_states=True).hidden_states for m in (ours, theirs)
    )
    assert len(found) == len(expected)
    seen = mask.bool()
    for one, other in zip(found, expected, strict=True):
        assert (one[seen] - other[seen]).abs().max() <= 1e-5 * other[seen].abs().max()


def test_labels_that_a_classifier_does_not_have_are_refused(classifiers):
    ours, _ = classifiers[3]
    ids, _ = padded(ours.spec.vocab_size)
    for problem, labels, message in (
        (None, torch.tensor([2, 3, 0]), "found the label 3; this model has 3 labels: expected 0 to 2"),
        (None, torch.tensor([[1, 0, 1]] * 3), r"int64 of shape \(3, 3\); expected integers of shape \(3,\)"),
        (None, torch.tensor([1.0, 0.0, 1.0]), "expected numbers of shape .3, 3. for multi_label"),
        ("single_label_classification", torch.tensor([1.0, 0.0, 1.0]), "expected integers"),
    ):
        ours.config.problem_type = problem
        with pytest.raises(DataError, match=message):
            ours(ids, labels=labels)
    ours.config.problem_type = "ranking"
    with pytest.raises(ConfigError, match="problem_type is 'ranking'; expected one of regression"):
        ours(ids, labels=torch.tensor([0, 1, 2]))
    with pytest.raises(DataError, match="leave out every_token"):
        ours(ids, labels=torch.tensor([0, 1, 2]), every_token=True)
    ours.config.problem_type = None


def test_two_micro_batches_of_trainer_equal_one_batch_of_transformers_own_classifier(tmp_path):
    """Trainer counts the labels of both; transformers' classes ignore the count, and add up two means."""
    torch.manual_seed(0)
    ours = randomised(liger_models.from_config(config_of("llama"), labels=3, device="cpu"))
    ours.save_pretrained(tmp_path / "start")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "start")
    ids = torch.randint(PAD + 1, ours.spec.vocab_size, (8, 6))
    rows = [{"input_ids": row, "labels": torch.tensor(i % 3)} for i, row in enumerate(ids)]
    losses = []
    for model, batch_size in ((ours, 2), (theirs, 4)):
        arguments = transformers.TrainingArguments(
            str(tmp_path / "run"),
            max_steps=2,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=4 // batch_size,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        logged = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        losses.append([*logged, trainer.evaluate()["eval_loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # logged with four digits


def test_adapters_of_peft_train_the_head_where_it_is_named():
    peft = pytest.importorskip("peft")
    ids, labels = torch.randint(4, 50, (2, 5)), torch.tensor([0, 1])
    for saved in (None, ["lm_head"]):
        model = liger_models.from_config(config_of("llama"), labels=2, device="cpu", projections="split")
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS", modules_to_save=saved)
        adapted = peft.get_peft_model(model, config)
        with pytest.warns(UserWarning, match="classification head is frozen") if not saved else nullcontext():
            loss = adapted(input_ids=ids, labels=labels).loss
        loss.backward()
        trained = {name for name, p in adapted.named_parameters() if p.grad is not None}
        assert any("lm_head" in name for name in trained) == bool(saved)


def test_a_classifier_of_a_model_with_layers_in_its_head_is_refused():
    with pytest.raises(UnsupportedModelError, match="further layers before their last one"):
        liger_models.from_config(find_architecture("modernbert-decoder").tiny, labels=3, device="meta")
