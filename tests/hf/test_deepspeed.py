"""Two processes under DeepSpeed's ZeRO train our models as one process trains transformers' own."""

from __future__ import annotations

import pytest
from test_sharded import check

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

# Set the thresholds to zero below which parameters are not sharded, or are kept gathered for reuse.
ZERO3 = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_gather_16bit_weights_on_model_save": True,
}
ANY_OPTIMIZER = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
BATCHES = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}


def trainer(zero):
    return "trainer", {"deepspeed": {**ANY_OPTIMIZER, **BATCHES, "zero_optimization": zero}}


def native(level, scored=False):
    config = {**ANY_OPTIMIZER, **BATCHES, "zero_optimization": ZERO3}
    return "deepspeed", {"config": config, "level": level, "scored": scored}


CASES = {
    "zero2-llama": trainer({"stage": 2}),
    "zero3-llama": trainer(ZERO3),
    "zero3-gemma2": trainer(ZERO3),
    "zero3-qwen3_moe": trainer(ZERO3),
    "zero3-gpt_oss": trainer(ZERO3),
    "native-lean-llama": native("lean"),
    "native-mlp-gemma2": native("mlp"),
    "scored-gemma2": native("lean", scored=True),
    "native-checkpoint-qwen3_moe": native("checkpoint"),
    "native-all-gpt_oss": native("all"),
}


@pytest.mark.slow
@pytest.mark.supports("DeepSpeed", "ZeRO-2 and ZeRO-3 through Trainer", "zero.Init while loading")
@pytest.mark.supports("DeepSpeed", "tied and untied heads", "experts", "export", "native models", "scores")
def test_two_ranks_train_like_one(make_both, four_rows, tmp_path, run_ranks):
    ranks, _ = check(CASES, make_both, four_rows, tmp_path, run_ranks, DS_ACCELERATOR="cpu")
    for name in CASES:
        if name.startswith("zero3"):  # loaded into shards: no rank held the whole parameter
            assert ranks[0][name]["empty"] > 0, name
