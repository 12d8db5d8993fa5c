"""The report on two sets of log-probabilities of the same tokens."""

from __future__ import annotations

import math

import pytest
import torch

import liger_models

OURS = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.1, -9.0]])
COUNTED = torch.tensor([[1, 1, 1], [1, 1, 0]])


def test_numbers_follow_their_formulas():
    differences = [0.1, -0.3, 0.0, 0.5]  # of the counted tokens that the engine gave
    engine = OURS - torch.tensor([[0.1, -0.3, math.nan], [0.0, 0.5, math.inf]])
    report = liger_models.agreement(OURS, engine, COUNTED, clip=0.2, worst=2)
    ratios = [math.exp(d) for d in differences]
    assert report.tokens == 4
    assert report.error == pytest.approx(sum(math.exp(abs(d)) for d in differences) / 4)
    assert report.mean == pytest.approx(0.9 / 4)
    assert report.largest == pytest.approx(0.5)
    assert report.kl == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / 4)
    assert report.effective == pytest.approx(sum(ratios) ** 2 / 4 / sum(w * w for w in ratios))
    assert report.clipped == 0.5  # the ratios of -0.3 and of 0.5
    assert report.clipped_sequences == 0.5  # the mean differences are -0.1 and 0.25
    assert [(one.row, one.position) for one in report.worst] == [(1, 1), (0, 1)]
    assert report.worst[0].ours == pytest.approx(-0.1)
    assert report.worst[0].engine == pytest.approx(-0.6)


def test_equal_log_probabilities_agree_perfectly():
    report = liger_models.agreement(OURS, OURS, COUNTED)
    assert (report.tokens, report.error, report.kl, report.effective, report.clipped) == (5, 1, 0, 1, 0)


def test_the_report_prints_a_table():
    text = str(liger_models.agreement(OURS, OURS - 0.3, COUNTED, clip=0.2, worst=1))
    rows = {line[:40].strip(): line[40:].split() for line in text.splitlines()}
    assert rows["tokens compared"] == ["5"]
    assert rows["multiplicative error"] == ["1.349859"]
    assert rows["tokens with a ratio outside [0.8, 1.2]"] == ["100.0000%"]
    assert text.splitlines()[-1].split()[-1] == "1.34986"


@pytest.mark.parametrize(
    ("ours", "engine", "message"),
    [
        (OURS, OURS[:, :2], "found scores"),
        (OURS, torch.full((2, 3), math.nan), "no token to compare"),
        (OURS * math.nan, OURS, "not finite in ours"),
        (OURS, OURS - math.inf, "not finite in engine"),
    ],
    ids=["shape", "nothing", "nan", "infinite"],
)
def test_what_cannot_be_compared_is_refused(ours, engine, message):
    with pytest.raises(ValueError, match=message):
        liger_models.agreement(ours, engine, COUNTED)
