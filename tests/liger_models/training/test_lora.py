"""`--lora`: a run matches transformers with PEFT, writes PEFT's files, and resumes bit for bit."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import signal
import sys

import pytest
import torch
from randomised import randomise, randomise_trained
from rounding import BOUND
from safetensors.torch import load_file, save_file

import liger_models
from liger_models.architectures import find_architecture
from liger_models.cli import main
from liger_models.convert.errors import CheckpointError, ConfigError
from liger_models.layers.recompute import host_weights
from liger_models.training import TrainingInterrupted
from liger_models.training.adapters.lora_settings import LoraSettings
from liger_models.training.adapters.lora_targets import find_targets
from liger_models.training.data import Documents
from liger_models.training.learning_rate import LearningRate
from liger_models.training.loop import Run
from liger_models.training.lora import Adapters
from liger_models.training.optimizer import BETAS, EPS
from liger_models.training.processes.world import World

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

ADAPTER = "adapter_model.safetensors"
# Bound for adapters after a few steps. AdamW moves each element by about the learning rate, whatever the size
# of its gradient: where a float32 gradient is tiny, and so its relative error large, runs may diverge.
DRIFT = 1e-3


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, tokenizer_folder):
    """Factory of checkpoints of a family with random parameters and the tokenizer."""

    def make(family):
        folder = tmp_path_factory.mktemp("family") / family
        tiny = {**find_architecture(family).tiny, "vocab_size": 320, "num_hidden_layers": 2}
        for per_layer in ("layer_types", "no_rope_layers", "moe_layers"):
            tiny.pop(per_layer, None)
        torch.manual_seed(1)
        model = liger_models.from_config(tiny, device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape)
                parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + 0.1 * noise)
        model.save_pretrained(folder)
        for file in tokenizer_folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return make


def stock(folder, adapter=None, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, device_map={"": "cpu"}, **options
    )
    return model if adapter is None else peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)


def train_stock(model, run, steps):
    """Train in a plain loop over the documents of the run's batches, one at a time."""
    config, losses = run.config, []
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=BETAS, eps=EPS)
    for step in range(steps):
        rows = run.stream.take(run.rows_per_step)
        labels, loss = run.documents.count(rows).labels, 0.0
        for piece in (piece for row in rows for piece in row):
            ids = run.documents.inputs(piece)[None]
            logits = model(input_ids=ids, use_cache=False).logits[0]
            share = torch.nn.functional.cross_entropy(
                logits, run.documents.labels(piece), reduction="sum", ignore_index=-100
            )
            (share / labels).backward()
            loss += share.item() / labels
        torch.nn.utils.clip_grad_norm_(trained, config.clip)
        for group in optimizer.param_groups:
            group["lr"] = LearningRate(config.schedule, config.lr, steps, config.warmup).rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def distance(found, expected):
    assert found.keys() == expected.keys()
    return max(
        (found[name] - tensor).norm().item() / max(tensor.norm().item(), 1e-12)
        for name, tensor in expected.items()
    )


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", "r=4"),
        ("gemma2", "r=4,alpha=4,targets=q_proj+down_proj,rslora"),
        ("llama", "r=3,dora"),
        ("phi3", "r=4"),
        ("starcoder2", "r=4"),
        ("deepseek_v3", "r=4"),  # PEFT mistakes dense MLPs and shared experts for experts
        ("deepseek_v3", "r=4,targets=o_proj+down_proj"),
        ("deepseek_v3", "r=4,experts"),
        ("qwen3_moe", "r=3,targets=q_proj,experts,rslora"),
        ("gpt_oss", "r=3,targets=q_proj,experts"),  # gate and up alternate, and stacks are transposed
        ("llama4_text", "r=3,targets=q_proj,experts"),  # transposed, and not said to PEFT
    ],
)
def test_a_run_matches_transformers_and_peft(family, lora, checkpoints, settings, run):
    folder = checkpoints(family)
    config = settings(model=str(folder), lora=lora, eval_fraction=0.0, merge=True, steps=5)
    begun = Run(config, World("cpu"))
    (config_folder := folder.parent / "begun").mkdir()
    begun.adapters.write(config_folder)
    theirs = stock(folder, config_folder)
    expected = train_stock(theirs, begun, 5)
    result = run(config)
    for record, loss in zip(result.records, expected, strict=True):
        assert math.isclose(record["loss"], loss, rel_tol=BOUND)
        assert record["trainable_parameters"] == sum(p.numel() for p in begun.parameters)
    theirs.save_pretrained(folder.parent / "theirs")
    theirs_adapter, ours = (load_file(path / ADAPTER) for path in (folder.parent / "theirs", result.final))
    assert distance(ours, theirs_adapter) <= DRIFT
    assert any(tensor.any() for name, tensor in ours.items() if "lora_B" in name)

    # The merged model equals PEFT's merge into transformers' own, up to the order of a sum of 4 products.
    merged = stock(folder, result.final).merge_and_unload().state_dict()
    found = stock(result.final.parent / "merged").state_dict()
    assert distance(found, merged) <= 1e-6
    files = load_file(result.final.parent / "merged" / "model.safetensors")
    assert distance(dict(liger_models.from_hub(result.final).checkpoint_tensors()), files) <= 1e-6
    config_file = json.loads((result.final / "adapter_config.json").read_text())
    assert config_file["base_model_name_or_path"] == str(folder)
    assert not (result.final / "model.safetensors").exists()


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


def test_all_linear_layers_of_deepseek_v3_are_adapted(checkpoints, settings):
    adapters = Run(settings(model=str(checkpoints("deepseek_v3")), lora="r=4"), World("cpu")).adapters
    adapted = {name.partition("layers.")[2] for own in adapters.layers.values() for name in own.rows}
    assert {f"0.mlp.{name}_proj" for name in ("gate", "up", "down")} <= adapted
    assert {f"1.mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")} <= adapted


def test_indexers_which_no_loss_reaches_get_no_adapter(checkpoints, settings):
    folder = str(checkpoints("deepseek_v32"))
    run = Run(settings(model=folder, lora="r=4"), World("cpu"))
    assert any(".indexer." in name for name, _ in run.model.named_parameters())
    assert not any(".indexer." in name for name in run.adapters.layers)
    with pytest.raises(ConfigError, match="no linear layer is called 'weights_proj'"):
        Run(settings(model=folder, lora="r=4,targets=weights_proj"), World("cpu"))


@pytest.mark.parametrize(
    ("family", "left_out", "reason"),
    [
        ("aria", "vision.projector.out_proj", "multiplies by their weights without calling them"),
        ("jamba", "layers.0.mamba.dt_proj", "multiplies by their weights without calling them"),
        ("minimax_m3_vl", "layers.0.mlp.gate_proj", "joins their weights with those of other layers"),
        ("gemma3", "vision.projector.linear", "holds their weights as plain parameters"),
        ("zamba2", "shared.1.shared_transformer.self_attn.q_proj", "several layers share their weights"),
    ],
)
def test_layers_whose_adapters_peft_cannot_read_get_none(family, left_out, reason):
    model = liger_models.from_config(find_architecture(family).tiny, device="meta")
    model.split_projections()
    with pytest.warns(UserWarning, match=rf"layers \({left_out}, ...\) get no adapter: .*{reason}"):
        layers, _ = find_targets(model, LoraSettings.parse(""), ())
    assert layers
    assert left_out not in layers
    stored = next(model.weight_map()[f"{left_out}.weight"].refs()).name.removesuffix(".weight")
    with pytest.raises(ConfigError, match=f"{left_out} cannot have this adapter: .*{reason}"):
        find_targets(model, LoraSettings.parse(f"targets={stored}"), ())


def test_targets_that_also_fit_layers_without_adapters_say_so():
    model = liger_models.from_config(find_architecture("aria").tiny, device="meta")
    model.split_projections()
    with pytest.warns(UserWarning, match=r"1 layers \(vision.projector.out_proj, ...\) get no adapter"):
        layers, _ = find_targets(model, LoraSettings.parse("targets=out_proj"), ())
    assert layers
    assert "vision.projector.out_proj" not in layers


def test_a_layer_that_is_several_in_transformers_is_adapted_as_a_whole():
    model = liger_models.from_config(find_architecture("kimi_k25").tiny, device="meta")
    model.split_projections()
    encoder = {"q_proj", "k_proj", "v_proj"}

    def adapted(targets):
        found = find_targets(model, LoraSettings.parse(f"targets={targets}"), ())[0]
        return {path for path in found if path.startswith("vision.encoder.layers.0.")}

    whole = {"vision.encoder.layers.0.self_attn.qkv_proj"}
    assert adapted("wqkv") == adapted("attn.q_proj+attn.k_proj+attn.v_proj") == whole
    with pytest.raises(ConfigError, match=r"qkv_proj is one layer here, .* name all of them, or none"):
        adapted("attn.q_proj")
    found = find_targets(model, LoraSettings.parse(""), ())[0]
    assert {name.rpartition(".")[2] for name in found[whole.pop()].rows} == encoder


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


@pytest.mark.parametrize(
    ("family", "lora", "error"),
    [
        ("llama", "r=4,experts", "all experts are frozen, or the model has none"),
        ("qwen3_moe", "r=4,dora,experts", "neither dropout nor DoRA"),
    ],
)
def test_experts_that_cannot_be_adapted_are_refused(family, lora, error, checkpoints, settings):
    with pytest.raises(ConfigError, match=error):
        Run(settings(model=str(checkpoints(family)), lora=lora), World("cpu"))


@pytest.mark.parametrize("option", ["dropout=0.1", "dora"])
def test_layers_that_peft_could_not_adapt_as_parameters_are_named(option, checkpoints, settings):
    folder = str(checkpoints("deepseek_v3"))
    with pytest.warns(UserWarning, match=r"6 layers \(.*mlp.*\) get no adapter: .*without dropout"):
        adapters = Run(settings(model=folder, lora=f"r=4,{option}"), World("cpu")).adapters
    assert not any(".mlp." in name for name in adapters.layers)
    with pytest.raises(ConfigError, match=r"down_proj cannot have this adapter: .*stacks of experts"):
        Run(settings(model=folder, lora=f"r=4,targets=o_proj+down_proj,{option}"), World("cpu"))


def test_only_the_adapted_layers_change(checkpoint, settings, run):
    result = run(settings(lora="r=4", merge=True))
    before, after = (load_file(f / "model.safetensors") for f in (checkpoint, result.final.parent / "merged"))
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert {name.split(".")[-2] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


@pytest.mark.parametrize(("lora", "level"), [("r=4", "lean"), ("r=4,dropout=0.2", "checkpoint")])
def test_a_run_resumed_after_a_signal_gives_the_same_bits(
    lora, level, settings, losses, run, monkeypatch, tmp_path
):
    unstopped = run(settings(lora=lora, activation_memory=level, output=tmp_path / "unstopped"))
    make, made = Documents.batch, []

    def batch(self, rows):
        made.append(rows)
        if len(made) == 9:
            signal.raise_signal(signal.SIGTERM)
        return make(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Documents, "batch", batch)
        with pytest.raises(TrainingInterrupted):
            run(settings(lora=lora, activation_memory=level, save_every=0))
    saved = sorted(p.name for p in (tmp_path / "run").glob("checkpoint-*/*"))
    assert {ADAPTER, "adapter_config.json", "tokenizer.json", "training_state"} <= set(saved)
    result = run(settings(lora=lora, activation_memory=level, save_every=0, resume="auto"))
    assert losses(result) == losses(unstopped)
    one, other = (load_file(r.final / ADAPTER) for r in (result, unstopped))
    assert distance(one, other) == 0


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_a_run_with_weights_in_host_memory_has_the_same_bits(
    quantize, settings, losses, run, monkeypatch, tmp_path
):
    if quantize:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(host_weights, "LEAST", 1)  # of a tiny model
    options = {"lora": "r=4", "quantize": quantize, "merge": True, "activation_memory": "offload"}
    if quantize and importlib.import_module("bitsandbytes").functional.has_avx512bf16():
        options["eval_fraction"] = 0.0  # there bitsandbytes evaluates no layer narrower than a block of 64
    here, there = (
        run(settings(output=tmp_path / where, weights_memory=where, **options))
        for where in ("device", "host")
    )
    assert losses(here) == losses(there)
    ours, theirs = (load_file(r.final.parent / "merged" / "model.safetensors") for r in (here, there))
    assert distance(ours, theirs) == 0


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


def test_a_resumed_run_must_have_the_same_adapters_and_model(settings, run, checkpoints):
    run(settings(lora="r=4", steps=2))
    for changed in ({"lora": "r=8"}, {"lora": None}, {"lora": "r=4", "model": str(checkpoints("llama"))}):
        with pytest.raises((ConfigError, CheckpointError)):
            run(settings(**{"steps": 4, "resume": "auto", **changed}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=4", "'rank=4' is not a setting"),
        ("r=four", "'r=four' is not a number"),
        ("r=4,r=8", "occurs twice"),
        ("dora=1", "'dora=1' is not a setting"),
        ("r", "'r' is not a setting"),
        ("r=0", "a rank of 1 or more"),
        ("dropout=1.0", "dropout from 0"),
        ("alpha=-2", "an alpha above 0"),
    ],
)
def test_errors_for_bad_settings_say_what_to_pass(text, message, settings):
    with pytest.raises(ConfigError, match=message):
        settings(lora=text)


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


def test_lora_settings_are_parsed():
    assert LoraSettings.parse("") == LoraSettings(16, None, "all-linear", 0.0)
    assert LoraSettings.parse("r=8, rslora").scaling_alpha == 16
    given = LoraSettings.parse("r=8,alpha=4,targets=q_proj+v_proj,dropout=0.1,dora")
    assert given == LoraSettings(8, 4.0, "q_proj+v_proj", 0.1, dora=True)


def test_impossible_settings_are_reported_before_training(settings, run, monkeypatch):
    with pytest.raises(ConfigError, match="no linear layer is called 'query'; this model has down_proj, "):
        run(settings(lora="targets=query"))
    with pytest.raises(ConfigError, match="no linear layer is called 'lm_head'"):  # tied to the embedding
        run(settings(lora="targets=lm_head"))
    with pytest.raises(ConfigError, match="require lora"):
        settings(quantize="nf4")
    with pytest.raises(ConfigError, match="one of nf4, int8"):
        settings(lora="", quantize="fp4")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"pip install 'liger_models\[quantize\]'"):
        run(settings(lora="", quantize="nf4"))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'liger_models\[lora\]'"):  # before data are read
        run(settings(lora="", data=("nowhere.jsonl",)))
