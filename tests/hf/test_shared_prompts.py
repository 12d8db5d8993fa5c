"""Our transformers models accept answers with a shared prompt, with adapters too."""

from __future__ import annotations

import pytest
import torch
from hf_pairs import BOUND, relative_distance

from liger_models.convert.errors import DataError
from liger_models.losses import sequence_log_probs, shared_prompts

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

ITEMS = [([5, 9, 12, 33, 8, 21], [[7, 8, 11, 3], [14, 11], [30]]), ([60], [[31, 19]])]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_scores_and_gradients_of_adapters_equal_those_of_separate_sequences(family, make_both):
    model = make_both(family, projections="split").ours
    config = peft.LoraConfig(
        r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, config)
    batch, found = shared_prompts(ITEMS), {}
    rows = batch.rows(model.score(**batch).log_probs)
    rows.sin().sum().backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[name], p.grad = p.grad, None
    expected = []
    for prompt, answers in ITEMS:
        for answer in answers:
            ids, labels = torch.tensor([prompt + answer]), torch.tensor([[-100] * len(prompt) + answer])
            scores = model.score(input_ids=ids, labels=labels).log_probs
            scores.sin().sum().backward()
            expected.append(sequence_log_probs(scores))
    assert relative_distance(sequence_log_probs(rows), torch.cat(expected)) <= BOUND
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    assert all(relative_distance(found[name], gradient) <= BOUND for name, gradient in gradients.items())


def test_a_tree_without_bounds_or_with_a_cache_is_refused(make_both):
    model = make_both("llama").ours
    batch = shared_prompts(ITEMS)
    with pytest.raises(DataError, match="pass both"):
        model(batch["input_ids"], parents=batch["parents"])
    with torch.no_grad(), pytest.raises(DataError, match="several documents"):
        model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"], parents=batch["parents"], use_cache=True)
