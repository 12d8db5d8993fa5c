"""The code blocks of docs/post_training.md run one after the other, as printed."""

import re
from pathlib import Path

import torch

import liger_models
import liger_models.losses
from liger_models.architectures import find_architecture

PAGE = (Path(__file__).parents[3] / "docs" / "post_training.md").read_text()


def test_every_block_of_python_runs():
    model = liger_models.from_config(find_architecture("llama").tiny)
    ids = torch.randint(3, model.spec.vocab_size, (4, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    names = {
        "torch": torch,
        "model": model,
        "input_ids": ids,
        "labels": ids.masked_fill(mask == 0, -100),
        "attention_mask": mask,
        "rewards": torch.tensor([1.0, 0.0, 2.0, 5.0]),
    }
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 7
    for block in (block for block in blocks if not block.startswith("# Needs ")):
        model.zero_grad()
        exec(block, names)
        assert all(p.grad.any() for name, p in model.named_parameters())


def test_every_function_is_named():
    functions = {name for name in liger_models.losses.__all__ if name[0].islower()}
    assert functions <= set(re.findall(r"\w+", PAGE))
