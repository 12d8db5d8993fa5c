"""`python -m benchmarks lengths`: every method has a step on both sides, and one that fails is told."""

import pytest


def test_each_method_has_a_step_and_a_line(benchmarks, tmp_path):
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
    """From the same weights, in float32: what is measured side by side is one computation."""
    import torch

    pytest.importorskip("trl")
    pytest.importorskip("transformers")
    from benchmarks import lengths
    from benchmarks.training.shapes import config_of

    config = config_of("tiny") | {"max_position_embeddings": 64}
    for method, step in lengths.METHODS.items():
        case, cpu = lengths.Case(method, 16, "lean"), torch.device("cpu")
        ours, first, _, our_score = lengths._ours(case, config, cpu, True)
        theirs, second, _, their_score = lengths._trl(case, config, cpu, True)
        for one, other in ((ours.float(), theirs.float()), (first.float(), second.float())):
            names = dict(one.checkpoint_tensors())
            other.load_state_dict(
                {**names, "lm_head.weight": names.get("lm_head.weight", one.lm_head.weight)}
            )
        ids = torch.randint(config["vocab_size"], (lengths.ROWS[method], 16))
        found = [step(our_score, ours, first, ids), step(their_score, theirs, second, ids)]
        assert found[0].item() == pytest.approx(found[1].item(), rel=1e-5), method
