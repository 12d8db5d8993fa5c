"""Files of adapters: in PEFT's and vLLM's form, read back, merged, and in place of a model."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from peft_runs import ADAPTER, distance, stock
from randomised import randomise, randomise_trained
from safetensors.torch import load_file, save_file

import liger_models
from liger_models.architectures import find_architecture
from liger_models.cli import main
from liger_models.convert.errors import CheckpointError, ConfigError
from liger_models.training.adapters.lora_settings import LoraSettings
from liger_models.training.lora import Adapters


def test_files_of_experts_are_those_that_vllm_reads_as_stacks(checkpoints, settings, run):
    """vLLM takes `experts.base_layer` for gate_up_proj and `experts` for down_proj, A as [E, r, inputs] and
    B as [outputs, r, E] (vllm/lora/model_manager.py, `_stack_moe_lora_weights`).
    """
    folder = checkpoints("gpt_oss")
    lora = "r=3,alpha=12,targets=q_proj,experts"
    result = run(settings(model=str(folder), lora=lora, eval_fraction=0.0, merge=True, steps=2))
    adapter = load_file(result.final / ADAPTER)
    base, merged = (load_file(f / "model.safetensors") for f in (folder, result.final.parent / "merged"))
    for name, module in (("gate_up_proj", "experts.base_layer"), ("down_proj", "experts")):
        stem = f"model.layers.1.mlp.{module}"
        before, after = (x[f"model.layers.1.mlp.experts.{name}"] for x in (base, merged))  # inputs x outputs
        a, b = (adapter[f"base_model.model.{stem}.lora_{part}.weight"] for part in "AB")
        experts, inputs, outputs = before.shape
        a, b = a.view(experts, 3, inputs), b.view(outputs, 3, experts).permute(2, 0, 1)
        added = 4 * (b @ a).transpose(1, 2)
        assert added.abs().max() > 1e-4
        torch.testing.assert_close(after - before, added, rtol=0, atol=2**-22 * before.abs().max().item())


def test_adapters_of_one_a_are_read_back_and_those_of_several_are_refused(tmp_path):
    model = liger_models.from_config(find_architecture("kimi_k25").tiny, device="cpu")
    model.split_projections()
    adapters = Adapters(model, LoraSettings.parse("r=2,dora,targets=wqkv"), "base", seed=0)
    randomise_trained(model)
    adapters.write(tmp_path)
    expected = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for parameter in expected:
        model.get_parameter(parameter).data.zero_()
    adapters.read(tmp_path)
    for name, tensor in expected.items():
        assert torch.equal(model.get_parameter(name), tensor), name
    tensors = load_file(tmp_path / ADAPTER)
    changed = next(name for name in tensors if name.endswith("k_proj.lora_A.weight"))
    save_file(tensors | {changed: tensors[changed] + 1}, tmp_path / ADAPTER)
    with pytest.raises(CheckpointError, match="have different lora_A, but the model holds these as one"):
        adapters.read(tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "kimi_k25", "molmo2"])
def test_a_merged_adapter_of_joined_or_transposed_layers_is_the_trained_model(family, tmp_path):
    """Merged here, and read with its base from files: of weights in parts, in another order, transposed."""
    tiny = find_architecture(family).tiny
    model = liger_models.from_config(tiny, device="cpu")
    randomise(model)
    model.save_pretrained(tmp_path / "base")
    model.split_projections()
    adapters = Adapters(model, LoraSettings.parse("r=2,dora"), str(tmp_path / "base"), seed=0)
    randomise_trained(model)
    (tmp_path / "adapter").mkdir()
    adapters.write(tmp_path / "adapter")
    read = dict(liger_models.from_hub(tmp_path / "adapter", dtype=torch.float32).checkpoint_tensors())
    adapters.merge()
    merged = dict(model.checkpoint_tensors())
    before = load_file(tmp_path / "base" / "model.safetensors")
    assert distance(read, merged) <= 1e-6
    assert sum(not torch.equal(before[name], x) for name, x in merged.items()) >= len(adapters.layers)


def test_an_adapter_is_accepted_wherever_a_model_is(checkpoint, settings, run, tmp_path, capsys):
    """Fine-tune an adapter, then train it with DPO, one command each; the first result is the reference."""
    tuned = run(settings(lora="r=4", steps=3, lr=1e-2)).final
    pair = {"prompt": "abc", "chosen": " efg", "rejected": " hij"}
    data = tmp_path / "pairs.jsonl"
    data.write_text((json.dumps(pair) + "\n") * 4)
    words = [
        "train",
        str(tuned.parent),
        "--objective",
        "dpo",
        "--data",
        str(data),
        "--lr",
        "1e-2",
        "--seq-len",
        "64",
    ]
    assert main([*words, "--steps", "2", "--output", str(tmp_path / "dpo"), "--device", "cpu"]) == 0
    assert "done: 2 steps; the trained adapter is in " in capsys.readouterr().out
    first = json.loads((tmp_path / "dpo" / "metrics.jsonl").read_text().splitlines()[0])
    assert math.isclose(first["loss"], math.log(2), rel_tol=1e-6)  # the reference is the fine-tuned model
    preferred = tmp_path / "dpo" / "final"
    about = json.loads((preferred / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(checkpoint)
    before, after = (load_file(folder / ADAPTER) for folder in (tuned, preferred))
    assert 0 < distance(after, before) < 1
    with pytest.raises(ConfigError, match="trained further with its own settings, r=4"):
        run(settings(model=str(tuned), lora="r=8", steps=1))

    moved = tmp_path / "moved"
    checkpoint_copy = shutil.copytree(checkpoint, moved)
    (preferred / "adapter_config.json").write_text(
        json.dumps(about | {"base_model_name_or_path": "gone/gone/gone"})
    )
    assert main(["merge", str(preferred), str(tmp_path / "merged")]) == 2
    assert "pass it as base= (--base)" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="is not an adapter, so it has no base model; omit base="):
        run(settings(model=str(checkpoint), adapter=str(checkpoint), steps=1))
    base = ["--base", str(checkpoint_copy)]
    assert main(["merge", str(preferred), str(tmp_path / "merged"), *base]) == 0
    ids = torch.arange(3, 40)[None]
    theirs = stock(checkpoint, preferred).eval()
    ours = liger_models.from_hub(tmp_path / "merged")
    assert torch.allclose(ours(ids).logits, theirs(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    capsys.readouterr()
    for command in ("generate", "verify"):
        extra = (
            ["--prompt", "abc", "--max-new-tokens", "3"] if command == "generate" else ["--no-transformers"]
        )
        assert main([command, str(preferred), *base, *extra]) == 0
