"""Adapters over a quantised base: bitsandbytes' bits, and those of a published checkpoint."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from peft_runs import ADAPTER, DRIFT, distance, stock, train_stock
from rounding import BOUND
from safetensors.torch import load_file, save_file

from liger_models.convert.errors import ConfigError
from liger_models.training.loop import Run
from liger_models.training.processes.world import World

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_quantised_base_weights_match_transformers(method, checkpoints, settings, run):
    pytest.importorskip("bitsandbytes")
    folder = checkpoints("llama")
    config = settings(model=str(folder), lora="r=4", quantize=method, eval_fraction=0.0, merge=True, steps=4)
    begun = Run(config, World("cpu"))
    (folder.parent / "begun").mkdir()
    begun.adapters.write(folder.parent / "begun")
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    bits = {"load_in_4bit": True, **four} if method == "nf4" else {"load_in_8bit": True}
    quantised = transformers.BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **bits)
    theirs = stock(folder, folder.parent / "begun", quantization_config=quantised).train()
    expected = train_stock(theirs, begun, 4)
    result = run(config)
    for record, loss in zip(result.records, expected, strict=True):
        assert math.isclose(record["loss"], loss, rel_tol=BOUND)
    theirs.save_pretrained(folder.parent / "theirs")
    theirs_adapter, ours = (load_file(path / ADAPTER) for path in (folder.parent / "theirs", result.final))
    assert distance(ours, theirs_adapter) <= DRIFT
    # Adapters are merged into the dequantised weights, which gives the model that was trained.
    merged = stock(result.final.parent / "merged")
    ids = torch.arange(3, 40)[None]
    assert torch.allclose(merged(input_ids=ids).logits, theirs(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_a_base_in_its_published_bits_trains_as_the_dense_one(checkpoint, settings, run, tmp_path, capsys):
    folder = tmp_path / "float8"
    shutil.copytree(checkpoint, folder)
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = weight
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 448
            tensors |= {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    options = {"model": str(folder), "dtype": "float32", "merge": True, "save_every": 2, "steps": 3}
    # Layers without adapters keep their bits, too.
    options["lora"] = "r=4,targets=q_proj+down_proj"
    kept = run(settings(output=tmp_path / "kept-True", keep_quantised=True, **options))
    dense = run(settings(output=tmp_path / "kept-False", **options))
    for record, other in zip(kept.records, dense.records, strict=True):
        for key in {"loss", "eval_loss"} & other.keys():
            assert math.isclose(record[key], other[key], rel_tol=BOUND)
    files = [*(tmp_path / "kept-True").glob("checkpoint-*/*.safetensors"), kept.final / ADAPTER]
    assert len(files) > 1
    for file in files:
        assert all(".lora_" in name for name in load_file(file))
    merged, expected = (
        load_file(result.final.parent / "merged" / "model.safetensors") for result in (kept, dense)
    )
    assert {n: x.dtype for n, x in merged.items()} == {n: x.dtype for n, x in expected.items()}
    assert distance(merged, expected) <= DRIFT
    assert "weights decoded to" not in capsys.readouterr().err
    run(settings(output=tmp_path / "full", model=str(folder), dtype="bfloat16", steps=1))
    assert "decoded to bfloat16: a bfloat16 export will be 0." in capsys.readouterr().err
    with pytest.raises(ConfigError, match="trained with keep_quantised=True"):
        run(settings(output=tmp_path / "kept-True", **{**options, "resume": "auto", "steps": 5}))
    with pytest.raises(ConfigError, match="require lora"):
        settings(keep_quantised=True)
    with pytest.raises(ConfigError, match="choose one"):
        settings(keep_quantised=True, quantize="nf4", lora="")
    with pytest.raises(ConfigError, match="use lora's targets"):
        settings(keep_quantised=True, freeze=("layers.0",), lora="")
