"""Checkpoints of every family load completely in every layout and are saved again byte for byte; we read
the reference's checkpoints, and the reference reads ours.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import changed, randomise, reference_class, relative_distance
from safetensors.torch import load_file, save_file
from ties import TieError, clear_of_ties
from variants import as_transformers_4, can_be_untied

import liger_models
from liger_models.architectures import find_architecture, list_architectures
from liger_models.cli import main
from liger_models.convert.checkpoints.expressions import Zeros
from liger_models.convert.checkpoints.expressions import write as write_tensors
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.config.rope_config import is_nested
from liger_models.layers.experts.router import Router
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.models.verification import verify_bytes
from liger_models.optim.adamw import AdamW

SHARDS = 3


@pytest.fixture(scope="module")
def written_by_reference(shared_pair, tmp_path_factory):
    """The folder of a family's checkpoint as the reference itself writes it, in float32, in several files."""
    folders: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in folders:
            reference = shared_pair(family).reference  # or skip
            folders[family] = tmp_path_factory.mktemp("checkpoints") / family
            reference.save_pretrained(folders[family], max_shard_size=100_000)
        return folders[family]

    return get


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.of_layers("settings")
def test_a_checkpoint_of_the_reference_gives_its_logits_and_is_saved_again_byte_for_byte(
    family, pair, written_by_reference, failures, tmp_path
):
    folder = written_by_reference(family)
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = liger_models.from_hub(folder).eval()
    batch, logits, _ = pair.probe
    with torch.no_grad():
        found = model(batch["input_ids"]).logits
    assert not failures({"logits": relative_distance(found, logits)})
    model.save_pretrained(tmp_path / "out")
    assert files(tmp_path / "out") == files(folder)


@pytest.mark.of_layers("names")
def test_the_reference_reads_our_checkpoints(family, written_by_reference, failures, tmp_path):
    """The values differ from those loaded, as after training."""
    model = liger_models.from_hub(written_by_reference(family)).eval()
    randomise(model, torch.Generator().manual_seed(2))
    model.save_pretrained(tmp_path / "out")
    read = reference_class(model.architecture).from_pretrained(tmp_path / "out", attn_implementation="eager")
    ids = torch.randint(0, model.spec.vocab_size, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found, expected = model(ids).logits, read(ids, use_cache=False).logits
    assert not failures({"logits": relative_distance(found, expected)})


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("stack", ["gate_up_proj", "down_proj"])
def test_verify_notices_the_gradient_of_a_single_expert(stack, name, written_by_reference, monkeypatch):
    """The error is a thousandth, in the expert with the smallest gradient."""
    from liger_models.layers.experts import moe
    from liger_models.models import verification

    compute, spoilt = moe.moe_experts, []

    def with_a_fault(x, weights, experts, gate_up, down, *rest, **options):
        matrix = gate_up if stack == "gate_up_proj" else down

        def spoil(gradient):
            sizes = gradient.flatten(1).norm(dim=1)
            expert = int(sizes.masked_fill(sizes == 0, torch.inf).argmin())
            spoilt.append(expert)
            gradient = gradient.clone()
            gradient[expert] *= 1.001
            return gradient

        if not spoilt and matrix.requires_grad:
            matrix = matrix * 1.0
            matrix.register_hook(spoil)
        matrices = (matrix, down) if stack == "gate_up_proj" else (gate_up, matrix)
        return compute(x, weights, experts, *matrices, *rest, **options)

    monkeypatch.setattr(moe, "moe_experts", with_a_fault)
    monkeypatch.setattr(verification, "SPREADS", 0)
    far = verification.verify_numbers(written_by_reference(name)).too_far
    stacks = {f"experts.{stack}[{expert}]" for expert in spoilt}
    assert {name.rpartition("mlp.")[2] for name in far} == stacks


@pytest.mark.of_layers("tokens")
def test_verify_accepts_a_checkpoint_of_the_reference(family, written_by_reference, capsys):
    assert main(["verify", str(written_by_reference(family)), "--transformers"]) == 0
    shown = capsys.readouterr().out
    assert "every byte the same" in shown
    assert "not compared" not in shown


# -- layouts


def every_layout():
    """(family, layout, whether the head is tied). Layouts are read and written by the same code, so that
    families whose layouts do everything suffice; and a tied head's tensor has the same form in all of them.
    """
    return [
        pytest.param(
            family,
            layout,
            tied,
            id=f"{family}-{i}-{'tied' if tied else 'untied'}",
            marks=pytest.mark.of_layers("head" if tied else "names"),
        )
        for family in list_architectures()
        for i, layout in enumerate(find_architecture(family).layouts)
        for tied in (False, True)
        if tied or can_be_untied(family)
    ]


@pytest.mark.parametrize(("family", "layout", "tied"), every_layout())
def test_every_layout_is_saved_again_byte_for_byte(family, layout, tied, tmp_path):
    """Covers mixed dtypes, the parts of a packed tensor in different files, a copy of a tied head's tensor,
    and unread tensors that are carried over.
    """
    model = write_mixed(tmp_path / "in", family, layout, tied)
    loaded = liger_models.from_hub(tmp_path / "in")
    loaded.save_pretrained(tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "in")
    sent, stored = dict(loaded.checkpoint_tensors()), tensors_of(tmp_path / "in")
    assert sent.keys() == stored.keys()
    assert all(same(sent[name], tensor) for name, tensor in stored.items())
    written = model.saved_tensors()
    for name, value in loaded.saved_tensors().items():
        assert value.dtype == written[name].dtype, name
        assert torch.equal(value, written[name]), name
    assert not verify_bytes(tmp_path / "in").changed


def tensors_of(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def same(found, expected):
    return found.dtype == expected.dtype and torch.equal(found, expected)


def test_tensors_that_a_checkpoint_lacks_are_zeros_and_are_saved_once_they_are_not(tmp_path):
    """A.X K1 was released without the correction bias of its routers."""
    without = next(layout for layout in find_architecture("axk1").layouts if layout.absent)
    write_mixed(tmp_path / "in", "axk1", without)
    model = liger_models.from_hub(tmp_path / "in")
    biases = {name: b for name, b in model.saved_tensors().items() if name.endswith("correction_bias")}
    assert biases
    for bias in biases.values():
        assert not bias.any()
        bias += torch.linspace(-1, 1, bias.numel())
    model.save_pretrained(tmp_path / "out")
    stored, before = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "in")
    assert len(stored) == len(before) + len(biases)
    assert all(same(stored[name], tensor) for name, tensor in before.items())
    again = liger_models.from_hub(tmp_path / "out").saved_tensors()
    assert all(torch.equal(again[name], bias) for name, bias in biases.items())


@pytest.mark.of_layers("tokens")
def test_a_model_of_mixed_dtypes_is_trained_and_saved(family, tmp_path):
    write_mixed(tmp_path / "in", family, find_architecture(family).layouts[0])
    models = [liger_models.from_hub(tmp_path / "in", dtype=dtype).eval() for dtype in ("float32", "auto")]
    ids, results = ids_clear_of_ties(models[0]), []
    for model in models:
        output = model(ids, labels=ids, return_logits=True)
        output.loss.backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in trained)
        gradient = torch.cat([p.grad.flatten().float() for p in trained])
        results.append((output.logits, gradient))
    for truth, found in zip(*results, strict=True):
        # A hundred roundings to bfloat16, of 2^-9 each. A missing tensor, or one in the place of another,
        # gives a distance of order one.
        assert relative_distance(found, truth) < 0.25

    AdamW(model.parameters(), lr=0.01).step()
    model.save_pretrained(tmp_path / "out", dtype="parameters")
    again = liger_models.from_hub(tmp_path / "out").saved_tensors()
    for name, value in model.saved_tensors().items():
        assert again[name].dtype == value.dtype, name
        assert torch.equal(again[name], value), name


def ids_clear_of_ties(model: CausalLM) -> torch.Tensor:
    """Ids with which roundings to bfloat16 change no token's experts, or are least likely to."""
    for margin, tokens in ((2**-6, 5), (2**-9, 5), (2**-9, 3)):  # of few tokens, all are clear more often
        for seed in range(200):
            ids = torch.randint(0, 100, (1, tokens), generator=torch.Generator().manual_seed(seed))
            with contextlib.suppress(TieError), torch.no_grad(), clear_of_ties(margin):
                model(ids)
                return ids
    raise AssertionError("all ids are near a tie")


def write_mixed(folder: Path, family: str, layout: Layout, tied: bool = False) -> CausalLM:
    """Write a checkpoint with matrices in bfloat16 and the rest in float32, with values that bfloat16 would
    round: routers too, if their logits are in float32. Return its model.
    """
    architecture, tied = find_architecture(family), tied or not can_be_untied(family)
    named = {"architectures": [architecture.reference], "tie_word_embeddings": tied}
    config = changed(architecture.tiny, named)
    read = HFConfig.load(config)
    model = CausalLM(architecture.spec(read))
    randomise(model, torch.Generator().manual_seed(4))
    forms, own = model.weight_map(Layout()), model.saved_tensors()
    routers = {path: m.spec for path, m in model.named_modules() if isinstance(m, Router)}
    wider = {f"{path}.weight" for path, spec in routers.items() if spec.float32_router}
    wider |= {name for name in own if name.endswith(WIDER)}
    weight_map = model.weight_map(layout)
    for name, expression in weight_map.items():
        value = own[name]
        if isinstance(expression, Zeros):
            value.zero_()
        elif not value.is_floating_point():  # experts by token id
            assert value.any()
        elif any(len(ref.shape) > 1 for ref in forms[name].refs()) and name not in wider:
            value.data = value.data.bfloat16()
        else:
            assert not torch.equal(value, value.bfloat16().float())
    parts = [(expression, own[name].detach()) for name, expression in weight_map.items()]
    tensors = {source: tensor.contiguous() for source, tensor in write_tensors(parts).items()}
    if model.spec.tie_word_embeddings:
        tensors[layout.name("lm_head.weight")] = tensors[layout.name("embed_tokens.weight")].clone()
    for pattern in architecture.carried(read):
        tensors[pattern.replace("*", "0")] = torch.rand(3)
    write(folder, tensors, config)
    return model


WIDER = ("_hc.fn", "stream_ends.fn", ".position_bias")
"""Ends of the names of matrices that released checkpoints store in float32 (DeepSeek-V4)."""


def write(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write a checkpoint whose tensors are assigned to its files in turn."""
    folder.mkdir()
    names = [f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors" for i in range(SHARDS)]
    placed = {name: names[i % SHARDS] for i, name in enumerate(tensors)}
    for file in names:
        held = {name: value for name, value in tensors.items() if placed[name] == file}
        save_file(held, folder / file, {"format": "pt"})
    size = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2) + "\n")


# -- config.json


@pytest.mark.of_layers("settings")
def test_configs_spelled_as_in_transformers_4_and_5_give_the_same_spec(family, pair, written_by_reference):
    raw = json.loads((written_by_reference(family) / "config.json").read_text())
    architecture = find_architecture(family)
    new, old = HFConfig.load(raw), HFConfig.load(as_transformers_4(raw, architecture.rope_keys))
    assert is_nested(old.raw.get("rope_parameters")) or "rope_parameters" not in old.raw
    assert architecture.spec(new) == architecture.spec(old) == pair.ours.spec
