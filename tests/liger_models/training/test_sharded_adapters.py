"""Adapters over a base that the ranks share, in the quantised bits of its checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file

from liger_models.convert.errors import ConfigError
from liger_models.training import train

sys.path.append(str(Path(__file__).parents[1] / "quantised"))
from published import EXPERTS, blocks
from quantised_files import QuantisedCheckpoint, float8_blocks

pytest.importorskip("peft")

RANK = Path(__file__).with_name("sharded_runs_rank.py")
RUNS = ("two", "stopped", "resumed", "experts")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, settings_for, tokenizer_folder):
    """Folder of the runs, and what each of the two ranks returned."""
    folder = tmp_path_factory.mktemp("sharded_adapters")
    config = {**EXPERTS, "vocab_size": 320, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    QuantisedCheckpoint.make(folder / "model", config, float8_blocks((32, 24)), blocks(32, 24))
    for file in tokenizer_folder.iterdir():
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    options = {"model": str(folder / "model"), "dtype": "float32", "steps": 3, "save_every": 0, "keep": 0}
    options |= {"lora": "r=2,experts", "keep_quantised": True, "eval_fraction": 0.0, "eval_every": 0}
    options |= {"schedule": "constant", "merge": True}
    train(settings_for(folder / "one", **options, gradient_accumulation=4))
    shared = options | {"gradient_accumulation": 2, "shard": "full"}
    without = shared | {"merge": False}
    planned = [
        (settings_for(folder / "two", **shared), 0, 2),
        (settings_for(folder / "stopped", **without), 1, 2),
        (settings_for(folder / "stopped", **without, resume="auto"), 0, 2),
        (settings_for(folder / "experts", **without, expert_parallel=2), 0, 2),
    ]
    (folder / "runs.json").write_text(json.dumps([(config.to_dict(), *rest) for config, *rest in planned]))
    return folder, [dict(zip(RUNS, outcomes, strict=True)) for outcomes in run_ranks(RANK, folder)]


def adapter(folder):
    return load_file(folder / "final" / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="FSDP2 of torch before 2.12 cannot shard integers")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
class TestTwoRanks:
    @pytest.mark.parametrize("other", ["two", "experts"])
    def test_train_as_one_process_does(self, other, runs):
        folder, outcomes = runs
        lines = (folder / "one" / "metrics.jsonl").read_text().splitlines()
        for one, two in zip(map(json.loads, lines), outcomes[0][other], strict=True):
            assert two["tokens"] == one["tokens"]
            for key in ("loss", "grad_norm", "trainable_parameters"):  # sums in another order
                assert two[key] == pytest.approx(one[key], rel=1e-4), key
        one, two = adapter(folder / "one"), adapter(folder / other)
        assert {name: x.shape for name, x in one.items()} == {name: x.shape for name, x in two.items()}
        assert any(".experts." in name for name in one)

    def test_resume_with_the_same_bits(self, runs):
        folder, outcomes = runs
        assert all("stopped after step 2 of" in rank["stopped"] for rank in outcomes)
        whole, resumed = adapter(folder / "two"), adapter(folder / "stopped")
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(x, resumed[name]) for name, x in whole.items())

    def test_merge_into_the_model_of_one_process(self, runs):
        folder, _ = runs
        one, two = (load_file(folder / name / "merged" / "model.safetensors") for name in ("one", "two"))
        assert one.keys() == two.keys()
        before = load_file(folder / "one" / "final" / "adapter_model.safetensors")
        assert before
        for name, x in one.items():
            # AdamW moves an element whose gradient is rounding either way, by the learning rate at most.
            torch.testing.assert_close(two[name], x, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"quantize": "nf4"}, "quantize 'nf4', whose weights cannot be sharded"),
        ({"lora": "r=2,dora"}, "dora, which needs the norms of whole rows"),
        ({"add_tokens": ("<|new|>",)}, "add_tokens, whose rows of the embedding are trained whole"),
        ({"objective": "reward"}, "objective reward, whose head is trained whole"),
    ],
)
def test_what_adapters_of_a_sharded_model_cannot_have_is_an_error(settings, match, settings_for, tmp_path):
    with pytest.raises(ConfigError, match=match):
        settings_for(tmp_path, **{"lora": "", "shard": "full", **settings})
