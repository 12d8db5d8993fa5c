"""The benchmarks run on a CPU, and their correctness check sees a wrong kernel."""

import csv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmarks(monkeypatch):
    """The package, which stands at the top of the repository and is not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    import benchmarks.__main__
    import benchmarks.operations
    import benchmarks.ops

    return benchmarks


def test_every_operation_is_right_and_peers_without_a_gpu_become_notes(benchmarks, tmp_path):
    arguments = ["ops", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert benchmarks.__main__.main(arguments) == 0
    with (tmp_path / "ops.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["provider"] for row in rows} == {"ours", "liger-kernel", "torch.compile", "eager"}
    for row in rows:
        measured = row["provider"] in ("ours", "eager")
        assert bool(row["training_ms_median"]) == measured, row
        assert bool(row["error"]) == measured, row
        assert measured or row["note"] == "measured on a GPU only", row
    assert (tmp_path / "ops.md").read_text().count("rms_norm") > 2


def test_a_wrong_kernel_is_reported_and_not_timed(benchmarks, monkeypatch, tmp_path):
    """A missing factor of the gradient, in one operand of one operation."""
    import liger_models.kernels as kernels

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return 1.05 * dx

    right = kernels.rms_norm
    monkeypatch.setattr(
        kernels, "rms_norm", lambda x, weight, eps: right(x, WrongGradient.apply(weight), eps)
    )
    case = benchmarks.operations.REGISTRY["rms_norm"].build((16, 64), torch.bfloat16, torch.device("cpu"))
    row = benchmarks.ops.Row("rms_norm", "16x64", "ours")
    with pytest.raises(ValueError, match=r"wrong: relative error (5\.0|4\.9)e-02"):
        benchmarks.ops._check(row, case, case.provider("ours"), case.expected(), torch.bfloat16)


def test_a_cross_entropy_whose_gradient_lacks_the_softmax_is_reported(benchmarks):
    case = benchmarks.operations.REGISTRY["cross_entropy"].build(
        (64, 20_000), torch.bfloat16, torch.device("cpu")
    )

    class LabelsAlone(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            wide = logits.detach().requires_grad_()
            with torch.enable_grad():
                loss = case.eager(wide)[0]
            ctx.gradient = torch.autograd.grad(loss, wide)[0].clamp(max=0)
            return loss.detach()

        @staticmethod
        def backward(ctx, upstream):
            return ctx.gradient

    def check(provider):
        row = benchmarks.ops.Row("cross_entropy", "64x20000", "ours")
        benchmarks.ops._check(row, case, provider, case.expected(), torch.bfloat16)

    check(case.provider("eager"))
    with pytest.raises(ValueError, match="wrong: relative error"):
        check(benchmarks.operations.Provider(lambda logits: (LabelsAlone.apply(logits),)))


def test_a_provider_that_overwrites_its_operands_is_noticed(benchmarks):
    class OverwritesGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            kept = dx.clone()
            dx.zero_()
            return kept

    case = benchmarks.operations.REGISTRY["swiglu"].build((16, 64), torch.float32, torch.device("cpu"))
    careful = case.provider("ours")
    careless = benchmarks.operations.Provider(lambda x: (OverwritesGradient.apply(careful.run(x)[0]),))

    def overwrites(provider):
        row = benchmarks.ops.Row("swiglu", "16x64", "ours")
        return benchmarks.ops._check(row, case, provider, case.expected(), torch.float32)

    assert not overwrites(careful)
    assert overwrites(careless)
