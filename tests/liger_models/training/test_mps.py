"""Runs on MPS, imitated: no float64, no copy that does not wait, no operation that torch lacks there."""

import pytest
from fake_mps import fake_mps

from liger_models.layers.projections import packed_linear
from liger_models.training import run_parts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:liger_models has never run on MPS")
@pytest.mark.parametrize("changes", [{}, {"lora": "r=4,dropout=0.5", "dtype": "bfloat16"}], ids=str)
def test_a_run_on_mps_has_a_cpus_losses_and_resumes_with_the_same_bits(
    changes, run, settings, losses, tmp_path, monkeypatch
):
    # Imitated parameters are not of torch's own class, which is asked for before layers are split.
    monkeypatch.setattr(packed_linear, "_check_plain", lambda *_: None)
    monkeypatch.setattr(run_parts, "measure_peak", lambda *_: 1e12)  # of matrices too large for a CPU
    changes = {**changes, "steps": 2, "eval_every": 1, "save_every": 1}
    on_cpu = losses(run(settings(**changes, output=tmp_path / "cpu")))
    with fake_mps():
        whole = run(settings(**changes, device="auto"))
        resumed = run(
            settings(**changes, device="mps", output=tmp_path / "resumed", resume=str(whole.checkpoints[0]))
        )
    assert losses(resumed)[-1] == losses(whole)[-1]
    # Sums of attention are in another order: 1e-5 in float32, and once more where bfloat16 rounds it, 2^-9.
    bound = 1e-5 if "dtype" not in changes else 2**-9
    assert losses(whole)[1][1:] == pytest.approx(on_cpu[1][1:], rel=bound)
