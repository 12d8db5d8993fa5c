"""`python -m benchmarks lengths`: every method runs a step on both sides, and failures are reported."""

from types import SimpleNamespace

import pytest


def test_each_method_runs_a_step_and_gets_a_line(benchmarks, tmp_path):
    cases = [part for method in ("dpo", "grpo", "kto") for part in ("--case", f"{method}:32")]
    cases += ["--case", "sft:32:lean+master", "--case", "sft:64"]
    arguments = ["lengths", "--model", "tiny", "--device", "cpu", "--steps", "1", "--out", str(tmp_path)]
    assert benchmarks.__main__.main([*arguments, *cases]) == 0
    lines = (tmp_path / "lengths.md").read_text().splitlines()
    found = [tuple(map(str.strip, line.split("|")[1:4])) for line in lines if line.startswith("| ")][2:]
    assert found == [
        ("sft", "1 x 64", "ours, checkpoint"),
        ("dpo", "2 x 32", "ours, checkpoint"),
        ("grpo", "1 x 32", "ours, checkpoint"),
        ("kto", "2 x 32", "ours, checkpoint"),
        ("sft", "1 x 32", "ours, lean, master"),
    ]


def test_both_sides_compute_the_same_losses(benchmarks):
    """Both sides have the same weights, in float32, so that the benchmark compares equal computations."""
    import torch

    pytest.importorskip("trl")
    pytest.importorskip("transformers")
    from benchmarks import lengths
    from benchmarks.peers import post_training
    from benchmarks.training.shapes import config_of

    config = config_of("tiny") | {"max_position_embeddings": 64}
    for method, step in post_training.METHODS.items():
        case, cpu = lengths.Case(method, 16, "lean"), torch.device("cpu")
        ours, first, _, our_score = lengths._ours(case, config, cpu, True)
        theirs, second, _, their_score = post_training.build_trl(method, config, cpu, True)
        for one, other in ((ours.float(), theirs.float()), (first.float(), second.float())):
            names = dict(one.checkpoint_tensors())
            other.load_state_dict(
                {**names, "lm_head.weight": names.get("lm_head.weight", one.lm_head.weight)}
            )
        ids = torch.randint(config["vocab_size"], (lengths.ROWS[method], 16))
        found = [step(our_score, ours, first, ids), step(their_score, theirs, second, ids)]
        assert found[0].item() == pytest.approx(found[1].item(), rel=1e-5), method


@pytest.mark.slow
def test_a_case_runs_in_its_own_command_and_a_peer_is_checked_without_ours(benchmarks, monkeypatch):
    """Runs as it would on a GPU, but for the command, which runs in this process, where TRL is imported."""
    pytest.importorskip("trl")
    import argparse

    from benchmarks import apart, lengths

    def run(command, **_):
        assert command[1:3] == ["-m", "benchmarks"]
        return SimpleNamespace(returncode=benchmarks.__main__.main(command[3:]))

    monkeypatch.setattr(apart, "subprocess", SimpleNamespace(run=run))

    parser = argparse.ArgumentParser()
    lengths.add_arguments(parser)
    args = parser.parse_args(["--model", "tiny", "--device", "cpu", "--steps", "2"])
    case = lengths.parse_case("sft:16:trl")
    row = lengths._apart(case, args)
    assert row["seconds"] > 0
    assert " ms, as measured " in lengths._check(args, [{**row, "case": case.name}])
    assert lengths._check(args, [{"case": "sft:16:lean", "seconds": 1.0}]) == ""


@pytest.mark.slow
def test_generation_runs_in_its_own_process_and_a_peer_is_checked_without_ours(
    benchmarks, monkeypatch, forked_command
):
    """Runs as it would on a GPU; a process that fails becomes a note."""
    pytest.importorskip("transformers")
    import argparse

    from benchmarks import apart, generate

    monkeypatch.setattr(apart, "subprocess", forked_command)
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    sizes = ["--prompt", "4", "--new", "2", "--runs", "1", "--batch", "1"]
    args = parser.parse_args(["--model", "tiny", "--device", "cpu", *sizes])
    (row,) = apart.rows_apart(generate._command(args, "transformers"), "transformers")
    assert row["tokens_per_second"] > 0
    assert " ms, as measured " in generate._check(args, "cpu", [row])
    (broken,) = apart.rows_apart(["generate", "--model", "none"], "ours")
    assert broken == {"provider": "ours", "note": "failed: the process ended with exit code 2"}
