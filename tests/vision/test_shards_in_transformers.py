"""Our vision-language models in transformers, sharded over two processes by FSDP2, with mixed precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pairs import relative_distance
from ranks import run_ranks
from scenes import Image, Video

transformers = pytest.importorskip("transformers")

RANK = Path(__file__).with_name("sharded_images_rank.py")
FAMILIES = ("qwen2_5_vl", "gemma3")


@pytest.mark.slow
@pytest.mark.supports("vision-language models", "FSDP2, with a bfloat16 policy")
def test_two_ranks_train_like_one(make_pair, tmp_path):
    """One rank has images and a video, whose seconds the policy must not round; the other has only text."""
    import liger_models.hf

    task, expected = {}, {}
    for family in FAMILIES:
        pair = make_pair(family)
        pair.reference.save_pretrained(tmp_path / family)
        calls = [pair.scene([1, Image(4, 4), 3, Video(3, 4, 2, 1.7), 2]), pair.scene([12])]
        if "second_per_grid_ts" in calls[0]:
            calls[0]["second_per_grid_ts"] = torch.as_tensor(calls[0]["second_per_grid_ts"])
        labels = sum(int((call["labels"][:, 1:] != -100).sum()) for call in calls)
        task[family] = (tmp_path / family, calls, labels)
    torch.save(task, tmp_path / "task.pt")
    liger_models.hf.register()
    for family, (folder, calls, labels) in task.items():
        for dtype in (torch.float32, torch.bfloat16):
            auto = transformers.AutoModelForImageTextToText
            model = auto.from_pretrained(folder, dtype=dtype).train()
            losses = [model(**call, num_items_in_batch=labels).loss for call in calls]
            torch.stack(losses).sum().backward()
            gradients = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
            model.zero_grad()
            model(**calls[1]).loss.backward()
            of_text = {n for n, p in model.named_parameters() if p.grad is not None}
            expected[family, str(dtype).removeprefix("torch.")] = gradients, losses, of_text
    liger_models.hf.unregister()
    found = run_ranks(RANK, tmp_path)
    for (family, dtype), (gradients, losses, of_text) in expected.items():
        # The same roundings of parameters and activations; only the rounding of sums differs.
        bound = 1e-5 if dtype == "float32" else 0.05
        for rank in (0, 1):
            loss, own, of_text_alone = found[rank][family, dtype]
            assert of_text_alone == of_text  # a text-only step has no gradients in the encoder
            assert loss == pytest.approx(2 * losses[rank].item(), rel=bound)
            assert own.keys() == gradients.keys()
            for name, gradient in gradients.items():
                if ".k_proj.bias" not in name and "qkv_proj.bias" not in name:  # for keys only rounding
                    distance = relative_distance(own[name], gradient, least_size=1e-2)
                    assert distance <= bound, (family, dtype, name)
