"""Distributed training of a vision-language model, where some processes have no images in a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pairs import spec_of
from ranks import run_ranks
from scenes import Image, Video

from liger_models.architectures import list_architectures
from liger_models.layers.specs import VisionSpec

RANK = Path(__file__).with_name("images_rank.py")
REFUSING = Path(__file__).with_name("refused_images_rank.py")
FAMILIES = ("gemma3", "mllama", "qwen2_5_vl", "qwen3_vl")


def test_a_process_without_images_takes_part(make_pair, tmp_path):
    """Under DDP and FSDP2, training equals one process with all rows.

    No process hangs, even if the encoder, or everything, is frozen.
    """
    task, expected, counts = {}, {}, {}
    for family in FAMILIES:
        pair = make_pair(family)
        calls = [pair.scene([1, Image(4, 4), 3, Image(6, 4), 2]), pair.scene([12])]
        counts[family] = [int((call["labels"][:, 1:] != -100).sum()) for call in calls]
        labels = sum(counts[family])
        state = {name: value.clone() for name, value in pair.ours.state_dict().items()}
        task[family] = (pair.config, state, calls, labels)
        pair.ours.zero_grad()
        losses = [pair.ours(**call, num_items_in_batch=labels).loss for call in calls]
        torch.stack(losses).sum().backward()
        expected[family] = {name: p.grad for name, p in pair.ours.named_parameters()}, losses, labels
    torch.save(task, tmp_path / "task.pt")
    found = run_ranks(RANK, tmp_path)
    for family in FAMILIES:
        gradients, losses, labels = expected[family]
        for wrapper in ("ddp", "fsdp"):
            for rank in (0, 1):
                loss, own = found[rank][family, wrapper]
                assert loss == pytest.approx(2 * losses[rank].item(), rel=1e-5)  # two shares of the mean
                alone = losses[rank].item() * labels / counts[family][rank]
                assert found[rank][family, wrapper, "judged"] == pytest.approx(alone, rel=1e-5)
                for name, gradient in gradients.items():
                    distance = (own[name] - gradient).norm()
                    assert distance <= 1e-5 * max(gradient.norm(), 1e-2), (family, wrapper, name)


REFUSED = {
    "pixels of one image": "was the text cut, or an image left out?",
    "tokens of another shape": "the shape of the tokens",
    "pixels alone": "without",
    "nothing": "",
}


@pytest.mark.parametrize("kind", ["native", pytest.param("transformers", marks=pytest.mark.slow)])
def test_images_that_one_process_refuses_are_refused_by_all(kind, make_pair, tmp_path):
    """No process waits for the others, under DDP and FSDP2."""
    task = {}
    for family in ("qwen2_5_vl", "mllama"):
        pair = make_pair(family)
        one, two = [1, Image(4, 4), 3, 2], [1, Image(4, 4), 3, Image(4, 4), 2]
        call, images = pair.scene(two), pair.scene(one)
        kinds = "mm_token_type_ids" if family == "qwen2_5_vl" else "cross_attention_mask"
        text = {"input_ids", "labels", "attention_mask", kinds}
        pixels = {name: value for name, value in images.items() if name not in text}
        faults = {
            "pixels of one image": call | pixels,
            "tokens of another shape": call | {kinds: call[kinds][:, 1:]},
            "pixels alone": {name: call[name] for name in ("input_ids", "labels", "pixel_values")},
            "nothing": call,
        }
        if family == "mllama":  # its mask names images, too
            faults["pixels of one image"] |= {kinds: call[kinds][:, :, :1]}
        pair.reference.config.save_pretrained(tmp_path / family)
        task[family] = (pair.config, tmp_path / family, call, faults)
    torch.save(task, tmp_path / "task.pt")
    others, refusing = run_ranks(REFUSING, tmp_path, kind, seconds=120)
    assert len(refusing) == 2 * 2 * len(REFUSED)
    for case, said in refusing.items():
        if case[-1] == "nothing":
            assert said == others[case] == "", case
        else:
            assert REFUSED[case[-1]] in said, case
            assert "another process refused its batch" in others[case], case


OF_TOKENS = [
    family
    for family in list_architectures(vision=True)
    if isinstance(spec_of(family).vision, VisionSpec)  # features are among the tokens
]


@pytest.mark.of_layers("tokens")
@pytest.mark.parametrize("family", OF_TOKENS)
def test_a_process_without_images_runs_the_whole_encoder(family, pair, monkeypatch):
    """And experts of pictures. They then have no effect: their gradients exist and are zero."""
    call = pair.scene([12])
    alone = pair.run_ours(**call)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    among_others = pair.run_ours(**call)
    assert torch.equal(among_others.loss, alone.loss)
    of_images = [p.grad for p in pair.ours.encoder_parameters()]
    pair.ours.zero_grad()
    assert all(gradient is not None and not gradient.any() for gradient in of_images)


def test_seconds_of_videos_reach_hooks_as_numbers(make_pair):
    """FSDP2's mixed precision rounds tensors in such a hook.

    With tensors, a process with a video would refuse its batch, and the others would wait for it.
    """
    pair = make_pair("qwen2_5_vl")
    call = pair.scene([1, Video(3, 4, 2, 1.7), 2])
    expected, seen = pair.run_ours(**call).loss, []
    call["second_per_grid_ts"] = torch.as_tensor(call["second_per_grid_ts"])

    def round_floats(module, args, kwargs):
        seen.append(kwargs["second_per_grid_ts"])
        half = {k: v.bfloat16() for k, v in kwargs.items() if k.startswith("second") and torch.is_tensor(v)}
        return args, kwargs | half

    hook = pair.ours.register_forward_pre_hook(round_floats, with_kwargs=True)
    found = pair.ours(**call).loss
    hook.remove()
    assert isinstance(seen[0], list)
    assert torch.equal(found, expected)
