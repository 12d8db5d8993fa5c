"""Medusa heads: loss against plain PyTorch, trained parameters, and the files that inference engines read."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import CheckpointError
from liger_models.models.medusa import MedusaModel

CALLS = {
    "rows": {},
    "padded": {"attention_mask": torch.tensor([[1] * 8, [1] * 5 + [0] * 3])},
    "packed": {"cu_seqlens": torch.tensor([0, 8, 10, 16])},
}


@pytest.fixture
def base():
    torch.manual_seed(0)
    model = liger_models.from_config(find_architecture("llama").tiny)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def randomised(medusa):
    for p in medusa.medusa_head.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return medusa


def documents(call):
    """Slices of the flattened tokens, one per document."""
    if "cu_seqlens" in call:
        bounds = call["cu_seqlens"].tolist()
        return [slice(*pair) for pair in itertools.pairwise(bounds)]
    lengths = call.get("attention_mask", torch.ones(2, 8)).sum(1).long().tolist()
    return [slice(8 * row, 8 * row + length) for row, length in enumerate(lengths)]


def expected_losses(medusa, hidden, labels, call):
    """Cross entropy of each head for hidden states [16, H] and labels [16], one document at a time."""
    losses = []
    for k, head in enumerate(medusa.medusa_head, 1):
        block, projection = head
        states, targets = [], []
        for document in documents(call):
            h, y = hidden[document], labels[document]
            states.append(h[: max(len(h) - k - 1, 0)])
            targets.append(y[k + 1 :])
        h = torch.cat(states)
        h = h + F.silu(h @ block.linear.weight.T + block.linear.bias)
        losses.append(F.cross_entropy(h @ projection.weight.T, torch.cat(targets)))
    return losses


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("trained_base", [None, 0.5], ids=["heads", "all"])
def test_the_loss_covers_the_tokens_after_the_next(call, trained_base, base):
    medusa = randomised(MedusaModel(base, num_heads=2, trained_base=trained_base))
    ids = torch.randint(base.spec.vocab_size, (2, 8))
    labels = ids.masked_fill(torch.rand(2, 8) < 0.2, -100)
    seen = {}
    base.lm_head.register_forward_pre_hook(lambda head, args: seen.update(hidden=args[0]))
    output = medusa(ids, labels, **call)
    base(ids, **call)
    hidden = seen["hidden"].detach().reshape(-1, base.spec.hidden_size)
    if "attention_mask" in call:  # without padding
        full = hidden.new_zeros(16, hidden.shape[1])
        full[call["attention_mask"].flatten().bool()] = hidden
        hidden = full
    losses = expected_losses(medusa, hidden, labels.flatten(), call)
    own = 0.0
    if trained_base is not None:
        own = trained_base * base(ids, labels=labels, **call).loss
    torch.testing.assert_close(output["head_losses"], torch.stack(losses), rtol=1e-5, atol=1e-6)
    expected = own + 0.8 * losses[0] + 0.64 * losses[1]
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-6)
    output.loss.backward()
    for p in medusa.medusa_head.parameters():
        found, p.grad = p.grad, None
        assert (found - torch.autograd.grad(expected, p, retain_graph=True)[0]).norm() <= 1e-5 * found.norm()
    assert all((p.grad is not None) is (trained_base is not None) for p in base.parameters())


def test_heads_are_initialised_from_the_models_own(base):
    medusa = MedusaModel(base, num_heads=2, num_layers=2)
    hidden = torch.randn(4, base.spec.hidden_size)
    for head in medusa.medusa_head:
        torch.testing.assert_close(head(hidden), base.lm_head(hidden))
        assert head[-1].weight.data_ptr() != base.lm_head.weight.data_ptr()


def test_a_head_beyond_the_end_of_all_documents_has_no_loss(base):
    medusa = MedusaModel(base, num_heads=3)
    ids = torch.randint(base.spec.vocab_size, (1, 3))
    output = medusa(ids, ids)
    assert output["head_losses"][0] > 0
    assert output["head_losses"][1:].tolist() == [0, 0]
    output.loss.backward()


def test_files_have_the_usual_names_and_are_read_back(base, tmp_path):
    medusa = randomised(MedusaModel(base, num_heads=2, num_layers=2))
    (tmp_path / "README.md").write_text("kept")
    medusa.save_heads(tmp_path, "some/model")
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    blocks = [f"{k}.{i}.linear.{kind}" for k in range(2) for i in range(2) for kind in ("weight", "bias")]
    assert sorted(tensors) == sorted([*blocks, "0.2.weight", "1.2.weight"])
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "medusa_num_heads": 2,
        "medusa_num_layers": 2,
        "base_model_name_or_path": "some/model",
        "version": "2",
    }
    assert (tmp_path / "README.md").exists()
    again = MedusaModel(base, num_heads=2, num_layers=2)
    again.load_heads(tmp_path)
    for name, p in medusa.medusa_head.state_dict().items():
        assert torch.equal(again.medusa_head.state_dict()[name], p)
        assert torch.equal(tensors[name], p)
    with pytest.raises(CheckpointError, match=r"2\.0\.linear\.bias is missing"):
        MedusaModel(base, num_heads=3, num_layers=2).load_heads(tmp_path)
