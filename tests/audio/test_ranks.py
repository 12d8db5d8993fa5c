"""Models with audio inputs, sharded over two processes by FSDP2, of which one has no sounds in a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import scenes
import sounds_rank
import torch
from clips import DOCUMENTS
from pairs import relative_distance
from ranks import run_ranks
from test_sounds_of_videos import DOCUMENTS as OF_VIDEOS
from test_sounds_of_videos import joined

FAMILIES = (
    *("gemma4", "gemma4_unified", "nemotron_h_omni", "qwen3_asr"),
    *("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_like_one(family, tmp_path):
    """Also of sounds that alternate with the video whose they are, in families that have these."""
    thinks = family.endswith("thinker")
    pair = scenes.make_pair(family, {"text_config": {"max_position_embeddings": 512}} if thinks else {})
    torch.manual_seed(0)
    first = joined(pair, *OF_VIDEOS) if thinks else pair.scene(*DOCUMENTS)
    calls = [first, pair.scene([12])]
    pair.reference.save_pretrained(tmp_path / family)
    labels = sum(int((call["labels"][:, 1:] != -100).sum()) for call in calls)
    torch.save({family: (tmp_path / family, calls, labels)}, tmp_path / "task.pt")
    found = run_ranks(Path(sounds_rank.__file__), tmp_path)
    for kind in ("native", "transformers"):
        model = made(kind, family, tmp_path / family)
        losses = [model(**call, num_items_in_batch=labels).loss for call in calls]
        torch.stack(losses).sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        model(**calls[1]).loss.backward()
        of_text = {n for n, p in model.named_parameters() if p.grad is not None}
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
            for rank in (0, 1):
                loss, own, of_text_alone = found[rank][family, kind, dtype]
                assert of_text_alone == of_text  # a text-only step has no gradients in the encoder
                assert loss == pytest.approx(2 * losses[rank].item(), rel=bound)
                assert own.keys() == gradients.keys()
                if dtype == torch.float32:
                    far = {n: relative_distance(own[n], x, 1e-2) for n, x in gradients.items()}
                    assert {n: d for n, d in far.items() if d > bound and "k_proj.bias" not in n} == {}


def made(kind, family, folder):
    import liger_models.hf

    if kind == "native":
        return liger_models.from_hub(folder).train()
    return liger_models.hf.classes_of(family).causal_lm.from_pretrained(folder).train()
