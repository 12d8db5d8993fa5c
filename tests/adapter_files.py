"""Adapters of `--lora` against PEFT's on transformers' own model: the same files, losses and gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pairs import Pair
from randomised import randomise_trained
from rounding import BOUND, beyond_bound, relative_distance
from safetensors.torch import load_file
from torch import Tensor

import liger_models
from liger_models.training.adapters.lora_settings import LoraSettings
from liger_models.training.lora import Adapters

# PEFT 0.21 renames these layers when it reads an adapter, its own as well: the pattern of transformers'
# conversion for `mlp.shared_expert.` fits `mlp.shared_experts`, too, and that for `model.layers.` also
# `language_model.layers.`.
RENAMED_AGAIN = "laguna", "mistral_large4", "deepseek_ocr2"


def compare_with_peft(pair: Pair, call: Mapping[str, Any], folder: Path, lora: str = "r=3") -> Adapters:
    """Write random adapters of a copy of the native model, load them with PEFT into a copy of transformers'
    own, and compare tensors, losses and gradients, those of A summed over the layers that share it.
    """
    import peft

    ours = liger_models.from_config(pair.config, device="cpu").train(pair.ours.training)
    ours.load_state_dict(pair.ours.state_dict())
    ours.split_projections()
    adapters = Adapters(ours, LoraSettings.parse(lora), "base", seed=0)
    randomise_trained(ours)
    adapters.write(folder)
    written = load_file(folder / "adapter_model.safetensors")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(pair.reference), folder, is_trainable=True)
    loaded = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
    assert written.keys() == loaded.keys()
    if pair.architecture.model_type in RENAMED_AGAIN:
        theirs.load_state_dict({_of_module(name): x for name, x in written.items()}, strict=False)
    for name, tensor in written.items():
        assert torch.equal(loaded[name], tensor), name

    def results_of_theirs() -> dict[str, Tensor]:
        theirs.zero_grad()
        loss = theirs(**call, use_cache=False).loss
        loss.backward()
        parameters, results = dict(theirs.named_parameters()), {"loss": loss}
        for path, layers in adapters.layers.items():
            for kind in ("lora_A.weight", "lora_B.weight"):
                names = {name: _of_module(f"base_model.model.{name}.{kind}") for name in layers.rows}
                parts = {name: parameters[own].grad for name, own in names.items()}
                if None not in parts.values():  # of experts that no token reaches
                    shared = kind == "lora_A.weight"
                    results[f"{path}.{kind}"] = sum(parts.values()) if shared else layers.read(kind, parts)
        return results

    loss = ours(**call).loss
    loss.backward()
    assert relative_distance(pair.ours(**call).loss, loss) > BOUND
    found = {"loss": loss}
    for name, p in ours.named_parameters():
        if p.grad is not None:
            found[name.replace(".default.", ".")] = p.grad
    assert not beyond_bound(found, results_of_theirs)
    return adapters


def _of_module(name: str) -> str:
    """A tensor's name in the adapted model."""
    return name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")
