"""accelerate on two processes, DDP and FSDP2, trains our models as one process trains transformers' own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_pairs import BOUND, relative_distance
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

RANK = Path(__file__).with_name("sharded_rank.py")

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)

# Tied and untied heads, both orders of norms, experts in two forms, sinks.
CASES = {
    "ddp-llama": {},
    "fsdp-llama": {"fsdp": {}, "level": "mlp"},
    "fsdp-gemma2": {"fsdp": {"state_dict_type": "FULL_STATE_DICT"}},
    "fsdp-gemma3_text": {"fsdp": {"cpu_ram_efficient_loading": True}},
    "fsdp-qwen3_moe": {"fsdp": {"activation_checkpointing": True}},
    "fsdp-gpt_oss": {"fsdp": {"cpu_ram_efficient_loading": True}, "level": "checkpoint"},
}


@pytest.fixture
def batch():
    """Four rows, of which the ranks have different numbers of labels."""
    ids = torch.randint(3, 131, (4, 13), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[2:, :8] = -100
    return {"input_ids": ids, "labels": labels}


def run_ranks(folder, cases, batch, device="cpu", ranks=2):
    torch.save({"cases": cases, "batch": batch}, folder / "task.pt")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*launch, str(RANK), str(folder), device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-6000:]
    return [torch.load(folder / f"results{rank}.pt") for rank in range(ranks)]


def train_alone(model, batch):
    """Two steps of transformers' own model on the whole batch."""
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(2):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.supports("FSDP2", "through accelerate", "tied heads", "experts", "save_state and load_state")
@pytest.mark.supports("accelerate", "DDP", "FSDP2")
def test_two_ranks_of_accelerate_train_as_one(make_both, batch, tmp_path):
    references = {}
    for name in CASES:
        family = name.partition("-")[2]
        # Losses of routers are not sums over tokens: their mean over ranks is another number.
        both = make_both(family, output_router_logits=False)
        both.folder.rename(tmp_path / name)
        references[name] = both.reference
    first, second = run_ranks(tmp_path, CASES, batch)
    for name, reference in references.items():
        found = first[name]
        assert found["losses"] == pytest.approx(train_alone(reference, batch), rel=1e-5), name
        assert found["again"] == found["losses"][1], name
        trained = type(reference).from_pretrained(tmp_path / name / "trained")
        for parameter, p in reference.named_parameters():
            assert relative_distance(trained.get_parameter(parameter), p) <= BOUND, (name, parameter)
        for rank in (first, second):
            assert not rank[name]["sent_wrong"]
            assert rank[name]["sent"] == set(load_file(tmp_path / name / "model.safetensors"))
        layers = {f"model.layers.{i}" for i in range(reference.config.num_hidden_layers)}
        wrapped = {shard.removesuffix("._checkpoint_wrapped_module") for shard in found["shards"]}
        rest = {"", "model.embed_tokens", "model.norm", "lm_head"}
        assert wrapped == (layers | rest if "fsdp" in CASES[name] else set()), name
