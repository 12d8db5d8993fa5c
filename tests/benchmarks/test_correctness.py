"""Every operation is compared with the truth, and the comparison detects a wrong kernel."""

import csv
import signal
import sys
import time

import pytest
import torch
import torch.nn.functional as F

import liger_models.kernels as kernels


class Changed(torch.autograd.Function):
    """x, whose gradient passes through `change`."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return ctx.change(dx), None


def test_every_operation_is_correct_and_peers_without_a_gpu_become_notes(benchmarks, tmp_path):
    assert benchmarks.__main__.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    with (tmp_path / "ops.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["operation"] for row in rows} == set(benchmarks.operations.REGISTRY)
    for row in rows:
        on_cpu = row["provider"] in ("ours", "eager", "SDPA") and not row["note"].startswith("has no")
        assert bool(row["training_ms_median"]) == on_cpu, row
        assert bool(row["error"]) == on_cpu, row
        assert row["failed"] == "False", row
        assert on_cpu or row["note"].startswith(("measured on a GPU only", "has no")), row
    # Two tables of four providers: the usual ones, and those of attention.
    report = (tmp_path / "ops.md").read_text()
    assert report.count("| operation | shape | ours | liger-kernel | torch.compile | eager |") == 3
    assert report.count("| operation | shape | ours | SDPA | FlexAttention | varlen |") == 3
    assert (tmp_path / "ops.png").stat().st_size > 10_000


def test_every_public_operation_with_a_kernel_is_measured(benchmarks):
    """Listed here are operations measured under another name or with another, or in torch only."""
    elsewhere = {
        "split_rotary_qkv",
        "split_norm_rotary_qkv",
        "multi_axis_tables",
        "document_bounds",
        "key_ranges",
        "marked_spans",
        "tree_ranges",
        "log_probs",
    }
    elsewhere |= {"adamw", "sum_of_squares"}  # measured by `python -m benchmarks optimizer`
    # Measured by `python -m benchmarks train --configuration ours+rowwise:lean:4`.
    elsewhere |= {"quantize", "float8_product", "has_float8_products"}
    elsewhere |= {"decode_codes"}  # by `python -m benchmarks kept`
    elsewhere |= {"embedding"}  # a small part of whole steps, by `python -m benchmarks train`
    # Operations without gradients, in whole models of deepseek_v32, minimax_m3_vl_text and bitnet.
    elsewhere |= {"choose_keys", "choose_blocks", "round_inputs", "round_weights", "weight_scales"}
    torch_alone = {"load_balancing_loss", "router_z_loss", "indexer_loss"}
    # States and decoding.
    torch_alone |= {"conv_state", "short_conv_step", "gated_delta_rule_step", "channel_delta_rule_step"}
    torch_alone |= {"ssd_step", "selective_scan_step", "rg_lru_step"}
    functions = {name for name in kernels.__all__ if name.islower()}
    assert functions - elsewhere - torch_alone <= set(benchmarks.operations.REGISTRY)


def test_a_peer_that_is_not_installed_becomes_a_note(benchmarks, monkeypatch, tmp_path):
    for module in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(benchmarks.ops, "CPU_PROVIDERS", ("ours", "liger-kernel"))
    arguments = ["--op", "relu2", "--op", "route", "--device", "cpu", "--out", str(tmp_path)]
    assert benchmarks.__main__.main(arguments) == 0
    report = (tmp_path / "ops.md").read_text()
    assert "- liger-kernel: not available: import of liger_kernel" in report
    assert "- liger-kernel: has no such operation (route)" in report


def test_a_wrong_kernel_is_reported_and_not_timed(benchmarks, monkeypatch, tmp_path):
    """A single operand's gradient has a wrong factor."""
    right = kernels.rms_norm

    def wrong(x, weight, eps):
        return right(x, Changed.apply(weight, lambda dw: 1.05 * dw), eps)

    monkeypatch.setattr(kernels, "rms_norm", wrong)
    arguments = ["ops", "--op", "rms_norm", "--provider", "ours", "--device", "cpu", "--out", str(tmp_path)]
    assert benchmarks.__main__.main(arguments) == 1
    with (tmp_path / "ops.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["note"].startswith(("wrong: relative error 5.0e-02", "wrong: relative error 4.9e-02"))
    assert not row["training_ms_median"]


def test_a_cross_entropy_whose_gradient_lacks_the_softmax_is_reported(benchmarks, build, check):
    case = build("cross_entropy", (64, 20_000))
    right = case.provider("eager")
    check(case, right)
    # The gradient is negative at the label only.
    wrong = benchmarks.operations.Provider(
        lambda logits: right.run(Changed.apply(logits, lambda d: d.clamp(max=0)))
    )
    with pytest.raises(benchmarks.bound.Wrong, match="wrong: relative error"):
        check(case, wrong)


def test_a_result_with_a_wrong_shape_is_reported_and_not_broadcast(benchmarks):
    with pytest.raises(benchmarks.bound.Wrong, match=r"found \(1, 8\), expected \(4, 8\)"):
        benchmarks.bound.check((torch.ones(1, 8),), (torch.ones(4, 8),), torch.float32)


def test_a_case_that_cannot_be_built_becomes_notes_and_the_run_continues(benchmarks, monkeypatch, tmp_path):
    def fail(shape, dtype, device):
        raise torch.OutOfMemoryError("too much")

    from benchmarks.operations.core import Operation

    broken = Operation("relu2", "gated", "tokens x width", fail, ((8, 8),), (8, 8), None, ("ours", "eager"))
    monkeypatch.setitem(benchmarks.operations.REGISTRY, "relu2", broken)
    arguments = ["--op", "relu2", "--op", "softmax", "--device", "cpu", "--out", str(tmp_path)]
    assert benchmarks.__main__.main(arguments) == 1
    report = (tmp_path / "ops.md").read_text()
    assert "- ours: out of memory (relu2)" in report
    assert "| softmax | 64x256 |" in report


def test_a_provider_that_overwrites_its_operands_is_detected(benchmarks, build, check):
    def kept_and_zeroed(dx):
        kept = dx.clone()
        dx.zero_()
        return kept

    case = build("swiglu", (16, 64), torch.float32)
    careful = case.provider("ours")

    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return kept_and_zeroed(dy)

    careless = benchmarks.operations.Provider(lambda x: Careless.apply(careful.run(x)))
    assert not check(case, careful, torch.float32)[1]
    assert check(case, careless, torch.float32)[1]


def test_a_provider_that_does_not_end_is_stopped_and_noted(benchmarks, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmarks.ops, "_PROVIDER_SECONDS", 0.5)
    monkeypatch.setattr(kernels, "relu2", lambda x: time.sleep(60))
    arguments = ["--op", "relu2", "--device", "cpu", "--out", str(tmp_path)]
    handler = signal.getsignal(signal.SIGALRM)
    assert benchmarks.__main__.main(arguments) == 1
    assert "- ours: stopped after 0.5 s (relu2)" in (tmp_path / "ops.md").read_text()
    assert signal.getsignal(signal.SIGALRM) is handler


@pytest.mark.parametrize("summed", [True, False])
def test_the_truth_in_chunks_equals_the_truth_of_all_rows(benchmarks, summed):
    """1,500 rows make a full chunk and a partial one."""
    from benchmarks.operations.losses import truth_in_chunks

    x, weight = torch.randn(1500, 4), torch.randn(7, 4)
    labels = torch.randint(7, (1500,))
    upstream = None if summed else (torch.randn(1500),)

    def losses(part, x, weight):
        return F.cross_entropy(F.linear(x, weight), labels[part], reduction="none")

    found = truth_in_chunks(losses, x, (weight,), torch.float64, upstream)
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    whole = losses(slice(None), *leaves)
    whole = whole.sum() if summed else whole
    expected = torch.autograd.grad(whole, leaves, None if summed else upstream[0].double())
    for a, b in zip(found, (whole, *expected), strict=True):
        torch.testing.assert_close(a, b.detach().float())


def test_a_router_has_a_unique_choice(build):
    """With ties in a row, providers could choose differently and all be right."""
    (logits,) = build("route", (50, 128, 8)).leaves
    assert all(len(row.unique()) == 128 for row in logits)


def test_packed_documents_are_unequal_and_fill_the_row(benchmarks):
    from benchmarks.operations.attention import unequal_lengths

    for documents, mean in ((8, 4096), (64, 512), (2, 24), (1, 7)):
        lengths = unequal_lengths(documents, mean)
        assert len(lengths) == documents
        assert sum(lengths) == documents * mean
        assert documents == 1 or (min(lengths), max(lengths)) == (mean // 2, mean * 3 // 2)


def test_packed_attention_across_documents_is_reported(benchmarks, build, check):
    case = build("attention_packed", (3, 24, 4, 2, 16))
    check(case, case.provider("ours"))
    one_row = benchmarks.operations.Provider(lambda q, k, v: kernels.attention(q, k, v, bounds=None))
    with pytest.raises(benchmarks.bound.Wrong):
        check(case, one_row)


@pytest.mark.parametrize("fault", ["window", "softcap", "sinks"])
def test_attention_without_its_option_is_reported(benchmarks, build, check, fault):
    """The operands make each option matter."""
    case = build(f"attention_{fault}", (2, 24, 4, 2, 16))
    plain = benchmarks.operations.Provider(
        lambda q, k, v, *sinks: (
            F.scaled_dot_product_attention(
                *(x.unflatten(0, (2, 24)).transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
            )
            .transpose(1, 2)
            .flatten(0, 1)
            + sum(0 * sink.sum() for sink in sinks)
        )
    )
    with pytest.raises(benchmarks.bound.Wrong):
        check(case, plain)
