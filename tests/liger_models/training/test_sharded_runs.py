"""Runs of processes that share a model: stopped, and resumed on the same or another number of processes."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from rounding import OtherOrder, beyond_rounding, relative_distance
from safetensors.torch import load_file

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import ConfigError
from liger_models.training import train
from liger_models.training.checkpoints.run_folder import verify

RANK = Path(__file__).with_name("sharded_runs_rank.py")
AT_NIGHT = {"kto", "distill", "sequence_whole", "muon", "muon_stopped", "muon_resumed"}
AT_NIGHT |= {"stopped", "resumed", "experts_stopped", "experts_resumed", "reward", "adapters"}
"""They divide again what others do: answers, a row, or an optimizer's state. By day runs that lost a rank, or
that one process began, are resumed; adapters are in test_sharded_adapters.py.
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]


def tensors(folder):
    found = {path: load_file(path) for path in sorted(folder.rglob("*.safetensors"))}
    return {f"{path.name} {name}": x for path, file in found.items() for name, x in file.items()}


def assert_same_bits(a, b):
    one, other = tensors(a), tensors(b)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def with_tokenizer(folder, tokenizer_folder, config):
    """Write a checkpoint with fresh bfloat16 weights and a tokenizer."""
    torch.manual_seed(3)
    model = liger_models.from_config({**config, "vocab_size": 320}, dtype="bfloat16", device="cpu")
    model.save_pretrained(folder)
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


@pytest.fixture(scope="module")
def experts(tmp_path_factory, tokenizer_folder):
    """Checkpoint of GLM-4.5's tiny config, whose routers have correction biases."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    return with_tokenizer(folder, tokenizer_folder, find_architecture("glm4_moe").tiny)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, settings_for, experts, judged):
    """Folder of the runs, and the results of each of the two ranks, by the run's name. Without
    `--all-families`, runs of AT_NIGHT are left out.
    """
    left_out = () if request.config.getoption("--all-families") else AT_NIGHT
    folder = tmp_path_factory.mktemp("sharded_runs")
    # There are five held-out batches for two ranks.
    options = {"gradient_accumulation": 2, "keep": 0, "eval_fraction": 0.3, "schedule": "constant"}
    balanced = {"model": experts, "bias_update_rate": 0.25, "eval_fraction": 0.0, "steps": 3}
    balanced |= {"save_every": 0}
    shared_rows = options | {"gradient_accumulation": 4, "sequence_parallel": 2}
    train(settings_for(folder / "one", **options | {"gradient_accumulation": 4}))
    objectives = {
        "dpo": {"data": (judged["pairs"],), "shard": "none"},
        "kto": {"data": (judged["labelled"],), "shard": "full"},
        "reward": {"data": (judged["pairs"],), "shard": "full"},
        "distill": {"shard": "full", "objective_options": {"teacher": str(experts)}},
        # A fused projection of which a part is frozen, split before the model is divided; and a new token.
        "frozen": {
            "objective": "sft",
            "shard": "full",
            "freeze": ("layers.*.q_proj",),
            "add_tokens": ("<|new|>",),
        },
    }
    if importlib.util.find_spec("peft"):
        objectives["adapters"] = {"objective": "sft", "shard": "none", "lora": "r=4"}
    objectives = {name: own for name, own in objectives.items() if name not in left_out}
    few = {"seq_len": 96, "save_every": 0, "steps": 3, "batch_size": 2}
    for name, own in objectives.items():
        objectives[name] = own = options | few | {"objective": name} | own
        alone = own | {"gradient_accumulation": 4, "shard": None, "data_cache": str(folder / "cache")}
        train(settings_for(folder / f"{name}_one", **alone))
    streamed = few | {"streaming": True, "shuffle_buffer": 9, "eval_fraction": 0.0, "eval_every": 0}
    streamed |= {"data_cache": str(folder / "cache"), "gradient_accumulation": 2}
    train(settings_for(folder / "streamed_one", **streamed | {"gradient_accumulation": 4}))
    (folder / "begun_by_one").mkdir()
    (folder / "begun_by_one" / "checkpoint-4").symlink_to(folder / "one" / "checkpoint-4")
    again = {"resume": "auto"}
    planned = {
        "two": (settings_for(folder / "two", **options), 0, 2),
        "stopped": (settings_for(folder / "stopped", **options), 2, 2),
        "resumed": (settings_for(folder / "stopped", **options, **again, optimizer_memory="host"), 0, 2),
        "hybrid": (settings_for(folder / "hybrid", **options, shard="hybrid", keep_best="eval_loss"), 0, 1),
        "begun_by_one": (settings_for(folder / "begun_by_one", **options, **again), 0, 2),
        "experts": (settings_for(folder / "experts", **balanced), 0, 2),
        "experts_stopped": (settings_for(folder / "experts_stopped", **balanced), 1, 2),
        "experts_resumed": (settings_for(folder / "experts_stopped", **balanced, **again), 0, 2),
        "sequence": (settings_for(folder / "sequence", **shared_rows), 0, 2),
        "sequence_whole": (settings_for(folder / "sequence_whole", **shared_rows, shard="none"), 0, 2),
        "sent": (settings_for(folder / "sent", **balanced, expert_parallel=2), 1, 2),
        "sent_resumed": (settings_for(folder / "sent", **balanced, **again), 0, 2),
        **{name: (settings_for(folder / f"{name}_two", **own), 0, 2) for name, own in objectives.items()},
        "streamed": (settings_for(folder / "streamed_two", **streamed), 0, 2),
        "called": (settings_for(folder / "called", **options), -5, 2),
        "muon": (settings_for(folder / "muon", **balanced, optimizer="muon"), 0, 2),
        "muon_stopped": (settings_for(folder / "muon_stopped", **balanced, optimizer="muon"), 1, 2),
        "muon_resumed": (settings_for(folder / "muon_stopped", **balanced, optimizer="muon", **again), 0, 2),
    }
    planned = {name: run for name, run in planned.items() if name not in left_out}
    outcomes = run_all(folder, list(planned.values()))
    return folder, [dict(zip(planned, results, strict=True)) for results in outcomes]


def run_all(folder, planned, backend="gloo"):
    """Run all on two ranks, and return the results of each rank."""
    written = [(config.to_dict(), *rest) for config, *rest in planned]
    (folder / "runs.json").write_text(json.dumps(written))
    return run_ranks(RANK, folder, backend=backend)


def losses(records):
    return [(r["step"], r.get("loss"), r.get("grad_norm"), r.get("eval_loss")) for r in records]


def test_a_run_stopped_on_one_rank_resumes_with_the_same_bits(runs):
    """The resumed run has the optimizer state of each rank's shards on the host."""
    folder, outcomes = runs
    if "stopped" not in outcomes[0]:
        pytest.skip("runs at night")
    runs_of = ("two", "stopped", "resumed", 3), ("experts", "experts_stopped", "experts_resumed", 2)
    runs_of += (("muon", "muon_stopped", "muon_resumed", 2),)
    for whole, cut, resumed, step in (names for names in runs_of if names[0] in outcomes[0]):
        assert all(f"stopped after step {step} of" in outcome[cut] for outcome in outcomes)
        assert (folder / cut / f"checkpoint-{step}").is_dir()
        assert losses(outcomes[0][resumed]) == losses(outcomes[0][whole])
        assert_same_bits(folder / whole / "final", folder / cut / "final")


def test_the_best_model_of_two_ranks_is_kept(runs):
    folder, outcomes = runs
    losses = {record["step"]: record.get("eval_loss") for record in outcomes[0]["hybrid"] if record["step"]}
    value, step = min((loss, step) for step, loss in losses.items() if loss is not None)
    best = folder / "hybrid" / "best"
    assert json.loads((best / "best.json").read_text()) == {
        "metric": "eval_loss",
        "value": value,
        "step": step,
    }
    written = folder / "hybrid" / ("final" if step == max(losses) else f"checkpoint-{step}")
    of_step = tensors(written)
    assert all(torch.equal(tensor, of_step[name]) for name, tensor in tensors(best).items())
    verify(best)


def test_ranks_share_the_rows_of_a_stream(runs):
    folder, outcomes = runs
    lines = (folder / "streamed_one" / "metrics.jsonl").read_text().splitlines()
    for one, two in zip(map(json.loads, lines), outcomes[0]["streamed"], strict=True):
        assert two["tokens"] == one["tokens"]
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert not list((folder / "cache" / "streams").glob("*/*"))


def test_a_callback_of_the_first_process_stops_all(runs):
    folder, outcomes = runs
    assert [record["step"] for record in outcomes[0]["called"]] == [0, 1, 2, 3, 4, 5]
    assert outcomes[1]["called"] == []
    assert (folder / "called" / "final" / "model.safetensors").is_file()


def test_one_process_and_two_write_the_same_files(runs):
    folder, _ = runs
    for name in ("checkpoint-2", "final"):
        one, two = folder / "one" / name, folder / "two" / name
        files = [sorted(str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()) for f in (one, two)]
        assert files[0] == files[1]
        assert "config.json" in files[0]
        verify(two)
    one, two = tensors(folder / "one" / "checkpoint-2"), tensors(folder / "two" / "checkpoint-2")
    assert [(n, x.dtype, x.shape) for n, x in one.items()] == [(n, x.dtype, x.shape) for n, x in two.items()]


@pytest.mark.parametrize("other", ["two", "hybrid", "begun_by_one", "sequence", "sequence_whole"])
def test_two_ranks_train_like_one_process_however_the_model_is_sharded(other, runs, settings_for):
    """Differences are bounded by those between two orders of sums in one process.

    AdamW divides gradients by their own size, so an element whose gradient is mostly rounding may go either
    way.
    """
    folder, outcomes = runs
    if other not in outcomes[0]:
        pytest.skip("runs at night")
    same = {"gradient_accumulation": 4, "keep": 0, "eval_fraction": 0.3, "schedule": "constant"}
    again = functools.partial(settings_for, **same)
    assert_equal_up_to_order(folder / other, folder / "one", again)


def assert_equal_up_to_order(other, one, settings_of):
    """Compare two folders of runs, up to the differences that other orders of sums make in `one`.

    `settings_of` returns the settings of `one` for another folder.
    """
    expected = results(one)

    def distances(folder):
        found = results(folder)
        assert found.keys() == expected.keys()
        return {key: relative_distance(found[key], value) for key, value in expected.items()}

    def again(seed):
        folder = one.with_name(f"{one.name}_in_order_{seed}")
        if not folder.exists():
            with OtherOrder(seed):
                train(settings_of(folder))
        return distances(folder)

    assert not beyond_rounding(distances(other), again)


def results(folder):
    """Return the tensors of the last checkpoints and the last two lines of metrics."""
    found = {}
    for name in ("final", "checkpoint-6"):
        found |= {f"{name} {key}": x for key, x in tensors(folder / name).items() if "random" not in key}
    for line in (folder / "metrics.jsonl").read_text().splitlines()[-2:]:
        record = json.loads(line)
        for key in ("step", "tokens", "loss", "grad_norm", "eval_loss"):
            found[f"{key} {record['step']}"] = torch.tensor(record.get(key, 0.0), dtype=torch.float64)
    return found


@pytest.mark.parametrize("objective", ["dpo", "kto", "reward", "distill", "frozen", "adapters"])
def test_objectives_are_means_over_all_ranks(objective, runs):
    """Equal up to rounding, as above.

    Ranks have different numbers of pairs and of good answers; reference scores are computed by one process,
    and by two.
    """
    folder, outcomes = runs
    if objective == "adapters":
        pytest.importorskip("peft", reason="peft is not installed")
    if objective not in outcomes[0]:
        pytest.skip("runs at night")
    lines = (folder / f"{objective}_one" / "metrics.jsonl").read_text().splitlines()
    two = outcomes[0][objective]
    metrics = {"kto": ("kl", "good_reward", "bad_reward"), "distill": ("divergence",)}
    metrics |= {"frozen": (), "adapters": ()}
    metrics = metrics.get(objective, ("margin", "accuracy"))
    for a, b in zip(map(json.loads, lines), two, strict=True):
        assert b["tokens"] == a["tokens"]
        for key in ("loss", "grad_norm", "eval_loss", *metrics):
            # The accuracy counts margins above zero. If the policy equals its reference, all margins are
            # rounding.
            if key == "accuracy" and abs(a.get("margin", 0)) < 1e-6:
                continue
            assert b.get(key, 0) == pytest.approx(a.get(key, 0), rel=1e-4, abs=1e-5), key


def test_a_run_with_expert_parallelism_resumes_without_it(runs):
    """bfloat16 has a precision of 2^-8; the loss, near log(320), is a mean over a hundred tokens."""
    folder, outcomes = runs
    assert all("stopped after step 2 of" in outcome["sent"] for outcome in outcomes)
    compared = outcomes[0]["experts"], outcomes[0]["sent_resumed"]
    whole, resumed = ({r["step"]: r for r in records} for records in compared)
    assert whole.keys() == resumed.keys() == {1, 2, 3}
    for step in whole:
        assert resumed[step]["loss"] == pytest.approx(whole[step]["loss"], rel=2**-8)
        assert resumed[step]["grad_norm"] == pytest.approx(whole[step]["grad_norm"], rel=2**-4)
    assert [*tensors(folder / "sent" / "final")] == [*tensors(folder / "experts" / "final")]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"expert_parallel": 2, "shard": "none"}, "expected shard 'full' or 'hybrid'"),
        ({"sequence_parallel": 0}, "sequence_parallel is 0; expected a whole number of 1 or more"),
        ({"sequence_parallel": 2}, "sequence_parallel is 2 and expert_parallel 1, but there are 1 processes"),
    ],
)
def test_the_error_names_sizes_that_processes_cannot_share(settings, match, settings_for, tmp_path):
    with pytest.raises(ConfigError, match=match):
        train(settings_for(tmp_path / "run", **settings))


def test_one_process_resumes_from_a_checkpoint_of_two(runs, settings_for, tmp_path):
    folder, _ = runs
    config = json.loads((folder / "runs.json").read_text())[0][0]
    changes = {name: config[name] for name in ("keep", "eval_fraction", "schedule")}
    resumed = folder / "two" / "checkpoint-4"
    changes |= {"gradient_accumulation": 4, "optimizer_memory": "host", "resume": str(resumed)}
    again = functools.partial(settings_for, **changes)
    train(again(tmp_path / "run"))
    assert_equal_up_to_order(folder / "two", tmp_path / "run", again)


@pytest.mark.gpu
def test_two_gpus_in_bfloat16_resume_with_the_same_bits_and_one_gpu_resumes_from_both(
    settings_for, tmp_path, monkeypatch, tiny_shape, tokenizer_folder
):
    """With PyTorch's deterministic kernels; ours always are."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model = with_tokenizer(tmp_path / "model", tokenizer_folder, {**tiny_shape, "head_dim": 64})
    options = {"model": model, "device": "cuda", "keep": 0, "schedule": "constant"}
    planned = [
        (settings_for(tmp_path / "whole", **options), 0, 2),
        (settings_for(tmp_path / "stopped", **options), 3, 2),
        (settings_for(tmp_path / "stopped", **options, resume="auto"), 0, 2),
    ]
    outcomes = run_all(tmp_path, planned, "nccl")
    assert all("stopped after step 4 of" in outcome[1] for outcome in outcomes)
    assert losses(outcomes[0][2]) == losses(outcomes[0][0])
    assert_same_bits(tmp_path / "whole" / "final", tmp_path / "stopped" / "final")
    alone = settings_for(
        **{"output": tmp_path / "alone", "resume": str(tmp_path / "whole" / "checkpoint-4")},
        **options | {"gradient_accumulation": 4},
    )
    records = {record["step"]: record for record in train(alone).records}
    for record in outcomes[0][0][-2:]:  # bfloat16 has a precision of 2^-8
        assert records[record["step"]]["loss"] == pytest.approx(record["loss"], rel=2**-8)
