"""Two processes train our models as one process trains transformers' own.

They use DDP and FSDP2, through accelerate and through Trainer.
"""

from __future__ import annotations

import json

import pytest
import torch
from hf_pairs import BOUND, relative_distance
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)

# Tied and untied heads, both orders of norms, experts in two forms, sinks. DDP comes first: accelerate's FSDP
# settings persist in the process.
CASES = {
    "ddp-llama": ("accelerate", {}),
    "trainer-ddp-llama": ("trainer", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}),
    "fsdp-llama": ("accelerate", {"fsdp": {}, "level": "mlp"}),
    "fsdp-gemma2": ("accelerate", {"fsdp": {"state_dict_type": "FULL_STATE_DICT"}}),
    "fsdp-gemma3_text": ("accelerate", {"fsdp": {"cpu_ram_efficient_loading": True}}),
    "fsdp-qwen3_moe": ("accelerate", {"fsdp": {"activation_checkpointing": True}}),
    "fsdp-gpt_oss": ("accelerate", {"fsdp": {"cpu_ram_efficient_loading": True}, "level": "checkpoint"}),
    "trainer-qwen2": ("trainer", {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}),
    "trainer-qwen3_moe": ("trainer", {"fsdp": True}),
}
AT_NIGHT = {"trainer-ddp-llama", "fsdp-llama", "fsdp-gemma3_text", "fsdp-qwen3_moe", "trainer-qwen3_moe"}
"""They combine again what others have."""


def check(cases, make_both, batch, folder, run_ranks, device="cpu", bound=BOUND, **environment):
    """Compare each case with transformers' own model, trained by one process on the whole batch."""
    references = {}
    for name in cases:
        # Router losses are not sums over tokens, so their mean over ranks differs.
        both = make_both(name.rpartition("-")[2], output_router_logits=False)
        both.folder.rename(folder / name)
        references[name] = both.reference
    ranks = run_ranks(folder, cases, batch, device, **environment)
    batch = {name: value.to(device) for name, value in batch.items()}
    for name, reference in references.items():
        momentum = 0.9 if cases[name][0] == "accelerate" else 0.0
        expected = train_alone(reference.to(device), batch, momentum)
        for rank in ranks:
            assert rank[name]["losses"] == pytest.approx(expected, rel=bound), name
            assert rank[name].get("again", expected[1]) == pytest.approx(expected[1], rel=bound), name
            assert not rank[name]["sent_wrong"], name
            assert rank[name]["sent"] == set(load_file(folder / name / "model.safetensors")), name
        trained = folder / name / "trained"
        assert json.loads((trained / "config.json").read_text())["architectures"] == [
            type(reference).__name__
        ]
        again = type(reference).from_pretrained(trained)
        for parameter, p in reference.named_parameters():
            assert relative_distance(again.get_parameter(parameter), p.cpu()) <= bound, (name, parameter)
    return ranks, references


def train_alone(model, batch, momentum):
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.05, momentum=momentum)
    losses = []
    for _ in range(2):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.supports("FSDP2", "through accelerate", "through Trainer", "tied heads", "experts")
@pytest.mark.supports("FSDP2", "save_state and load_state", "activation checkpointing", "export")
@pytest.mark.supports("accelerate", "DDP", "FSDP2")
@pytest.mark.supports("Trainer", "DDP", "FSDP2")
def test_two_ranks_train_like_one(make_both, four_rows, tmp_path, run_ranks, request):
    left_out = () if request.config.getoption("--all-families") else AT_NIGHT
    cases = {name: case for name, case in CASES.items() if name not in left_out}
    ranks, references = check(cases, make_both, four_rows, tmp_path, run_ranks)
    for name, (way, _) in cases.items():
        if way == "accelerate":
            layers = {f"model.layers.{i}" for i in range(references[name].config.num_hidden_layers)}
            found = {shard.removesuffix("._checkpoint_wrapped_module") for shard in ranks[0][name]["shards"]}
            rest = {"", "model.embed_tokens", "model.norm", "lm_head"}
            assert found == (layers | rest if "fsdp" in name else set()), name
        else:  # saved by Trainer and by ourselves
            files = [tmp_path / name / folder / "model.safetensors" for folder in ("trained", "by_hand")]
            assert files[0].read_bytes() == files[1].read_bytes()


# GPUs need no patched accelerate, and allow CPU offload.
GPU_CASES = CASES | {"fsdp-offload-llama": ("accelerate", {"fsdp": {"cpu_offload": True}})}


@pytest.mark.gpu
def test_two_gpus_train_like_one(make_both, four_rows, tmp_path, run_ranks):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    # Kernels and libraries sum float32 in different tiles, and so in a different order from the reference.
    check(GPU_CASES, make_both, four_rows, tmp_path, run_ranks, "cuda", bound=1e-4)
