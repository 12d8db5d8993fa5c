"""AdamW's update: the formula, each way to store a bfloat16 weight, random bits, and limits of sizes."""

import math

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from liger_models.kernels import AdamWSettings, AdamWTensors, adamw, sum_of_squares
from liger_models.kernels.optimizer._random_bits import (
    PERIOD,
    philox,
    rounding_noise,
    table_of_words,
    words_of_periods,
)
from liger_models.kernels.optimizer.adamw import RESIDUE_DTYPES, WEIGHTS, adamw_plain

BF16 = torch.bfloat16
SETTINGS = AdamWSettings(1e-2, 0.9, 0.95, 1e-8, 0.1, "plain", 7)
# With these settings and operands of few bits, every product and sum of a step is exact in float32; only a
# root and two quotients remain, which both forms round correctly, so they agree in every bit.
EXACT = SETTINGS._replace(lr=2.0**-6, beta1=0.5, beta2=0.5, eps=0.0, weight_decay=0.0)


def few_bits(*shape, dtype=torch.float32):
    """Random multiples of 1/16 from 1/16 to 4."""
    return (torch.randint(1, 65, shape) / 16).to(dtype)


def problem(size, weights="plain", dtype=BF16, moments=torch.float32, index=3, offset=0, step=4.0):
    """A parameter in mid-training, with random values everywhere."""
    residue, wide = None, torch.randn(size)
    if dtype == BF16 and weights == "compensated":
        residue = (wide - wide.bfloat16().float()).bfloat16()
    elif dtype == BF16 and weights == "master":
        residue = torch.randint(-(2**15), 2**15, (size,), dtype=torch.int16)
    state = few_bits(size, dtype=moments), few_bits(size, dtype=moments), torch.tensor(step), residue
    return AdamWTensors(wide.to(dtype), few_bits(size), *state, index, offset)


def copy(tensors, **changes):
    cloned = (x.clone() if isinstance(x, torch.Tensor) else x for x in tensors)
    return AdamWTensors(*cloned)._replace(**changes)


def part(tensors, first, stop):
    cut = (x[first:stop].clone() if isinstance(x, torch.Tensor) and x.dim() else x for x in tensors)
    return AdamWTensors(*cut)._replace(offset=tensors.offset + first)


def whole(tensors):
    """Weights in float32, with the residue added."""
    if tensors.residue is None:
        return tensors.parameter.float()
    if tensors.residue.dtype == BF16:
        return tensors.parameter.float() + tensors.residue.float()
    bits = (tensors.parameter.view(torch.int16).int() << 16) + tensors.residue.int()
    return bits.view(torch.float32)


def same(a, b):
    """Whether two problems agree in every bit."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, torch.Tensor)]
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("size", [1, 17, 4096, 5003])
@pytest.mark.parametrize("moments", [torch.float32, BF16])
def test_the_update_of_float32_weights_matches_torchs_adamw(size, moments, implementation, assert_near):
    tensors = problem(size, dtype=torch.float32, moments=moments)
    weight = nn.Parameter(tensors.parameter.double())
    weight.grad = tensors.gradient.double()
    lr, beta1, beta2, eps, decay, *_ = SETTINGS
    reference = torch.optim.AdamW([weight], lr, (beta1, beta2), eps, decay)
    state = {"exp_avg": tensors.exp_avg.double(), "exp_avg_sq": tensors.exp_avg_sq.double()}
    reference.state[weight] = {"step": tensors.step - 1, **{name: x.clone() for name, x in state.items()}}
    adamw([tensors], SETTINGS)
    reference.step()
    # Two subtractions from the weight, and a step of less than 0.4 that was rounded six times.
    assert_near(tensors.parameter, weight.detach(), 8)
    # A sum of two or three products. With "plain", a bfloat16 moment is rounded to nearest: one rounding
    # more.
    for name in state:
        assert_near(getattr(tensors, name), reference.state[weight][name], 5)


@pytest.mark.parametrize("moments", [torch.float32, BF16])
def test_master_weights_are_float32_weights_in_two_halves(moments, implementation):
    tensors = problem(5003, "master", moments=moments)
    settings = SETTINGS._replace(weights="master")
    wide = copy(tensors, parameter=whole(tensors), residue=None)
    for _ in range(3):
        gradient = torch.randn(5003)
        adamw([tensors._replace(gradient=gradient)], settings)
        adamw([wide._replace(gradient=gradient)], settings)
        assert torch.equal(whole(tensors), wide.parameter)
        half_a_unit = 2.0**-8 * wide.parameter.abs()
        assert ((tensors.parameter.float() - wide.parameter).abs() <= half_a_unit).all()


def test_the_rounding_error_of_a_compensated_weight_is_kept(implementation):
    tensors = problem(5003, "compensated")
    wide = copy(tensors, parameter=whole(tensors), residue=None)
    adamw([tensors], SETTINGS._replace(weights="compensated"))
    adamw([wide], SETTINGS)
    assert torch.equal(tensors.parameter, wide.parameter.bfloat16())
    assert torch.equal(tensors.residue, (wide.parameter - tensors.parameter.float()).bfloat16())


@pytest.mark.parametrize("weights", ["compensated", "master", "plain"])
def test_many_small_steps_add_up_except_with_plain(weights):
    """Each step is 1e-4, and the neighbours of 1 are 0.004 and 0.008 away."""
    steps, one = 200, torch.ones(64)
    residue = torch.zeros(64, dtype=RESIDUE_DTYPES[weights]) if weights in RESIDUE_DTYPES else None
    tensors = AdamWTensors(one.bfloat16(), one, one.clone(), one.clone(), torch.tensor(9.0), residue, 0)
    settings = SETTINGS._replace(lr=1e-4, weight_decay=0.0, weights=weights)
    true = 1.0
    for _ in range(steps):
        tensors.step.add_(1)
        before = tensors.exp_avg.double(), tensors.exp_avg_sq.double()
        adamw([tensors], settings)
        t = tensors.step.item()
        m, v = 0.9 * before[0] + 0.1, 0.95 * before[1] + 0.05
        true = true - 1e-4 * m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    if weights == "plain":
        assert torch.equal(tensors.parameter.float(), one)
    else:  # a residue of up to 2^-8 has 8 bits of precision; float32 has many more
        error = (whole(tensors) - true).abs().max()
        assert error <= steps * (2.0**-17 if weights == "compensated" else 2.0**-23)
        assert (1 - true).min() > 0.015


def test_stochastic_rounding_goes_to_an_adjacent_number_and_is_unbiased(implementation):
    size = 1 << 15
    tensors = AdamWTensors(
        *(torch.full((size,), x, dtype=d) for x, d in ((1.5, BF16), (1.0, torch.float32))),
        *(torch.ones(size) for _ in range(2)),
        *(torch.tensor(50.0), None, 0),
    )
    wide = copy(tensors, parameter=tensors.parameter.float())
    adamw([wide], SETTINGS)
    adamw([tensors], SETTINGS._replace(weights="stochastic"))
    true, unit = wide.parameter[0].item(), 2.0**-7
    below = true // unit * unit
    assert set(tensors.parameter.tolist()) == {below, below + unit}
    odds = (true - below) / unit
    deviation = unit * (odds * (1 - odds) / size) ** 0.5
    assert abs(tensors.parameter.double().mean().item() - true) < 5 * deviation
    assert odds > 0.1


def test_a_second_moment_in_bfloat16_can_decay():
    """A decay of a thousandth is less than half an ulp: rounded to nearest, the moment would never change."""
    size = 1 << 16
    settings = SETTINGS._replace(beta2=0.999)
    for weights, mean, tolerance in (("plain", 1.0, 0.0), ("master", 0.999, 5 * 2.0**-8 / size**0.5)):
        tensors = problem(size, weights, moments=BF16)
        tensors.exp_avg_sq.fill_(1.0)
        tensors.gradient.zero_()
        adamw([tensors], settings._replace(weights=weights))
        assert abs(tensors.exp_avg_sq.double().mean().item() - mean) <= tolerance


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_learning_rate_of_zero_changes_no_bit(weights, implementation):
    tensors = problem(100, weights)
    before = copy(tensors)
    adamw([tensors], SETTINGS._replace(lr=0.0, weights=weights))
    assert torch.equal(tensors.parameter, before.parameter)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_stays_nan(weights, value, implementation):
    """A carry in the rounding would turn NaN with all bits set, which GPUs produce, into -0."""
    tensors = problem(20, weights, moments=BF16)
    tensors.gradient[3] = value
    tensors.exp_avg[4] = torch.tensor(0x7FFF, dtype=torch.int16).view(BF16)
    adamw([tensors], SETTINGS._replace(weights=weights))
    assert whole(tensors).isnan().nonzero().flatten().tolist() == [3, 4]
    assert tensors.parameter.isnan().nonzero().flatten().tolist() == [3, 4]
    assert tensors.exp_avg[3].isnan() == math.isnan(value)
    assert not tensors.exp_avg[3].isfinite()
    assert tensors.exp_avg[4].isnan()


# Random bits.


def test_philox_gives_the_published_words():
    """Known answers of Random123, the reference implementation (kat_vectors, philox4x32 10)."""
    answers = {
        (0x0, 0x0): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        (0xFFFFFFFF, -1): "408f276d 41c83b0e a20bc7c6 6d5451fd",
    }
    for (word, seed), answer in answers.items():
        words = philox(seed, *[torch.tensor(word)] * 4)
        assert " ".join(f"{w.item():08x}" for w in words) == answer
    counter = [torch.tensor(word) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    words = philox(0x299F31D0A4093822, *counter)
    assert " ".join(f"{w.item():08x}" for w in words) == "d16cfe09 94fdcceb 5001e420 24126ea1"


REALISTIC = SETTINGS._replace(lr=3e-4, beta2=0.999, weight_decay=0.1)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    ("offset", "moments"),
    [(0, torch.float32), (16, BF16), (5, torch.float32), (3 << 34, BF16), (PERIOD - 1000, torch.float32)],
)
def test_both_forms_give_the_same_bits(weights, offset, moments, interpreted):
    """Both forms round every operation correctly, with none fused."""
    tensors = problem(4111, weights, moments=moments, offset=offset)
    tensors = tensors._replace(gradient=torch.randn(4111))
    again = copy(tensors)
    settings = REALISTIC._replace(weights=weights, seed=-5 << 40)
    adamw([tensors], settings, torch.tensor(0.3))
    adamw_plain(again, settings, torch.tensor(0.3))
    assert same(tensors, again)


def test_both_forms_give_the_same_bits_from_zero_to_infinity(interpreted):
    """Subnormal moments and weights of zero too."""
    size = 3001
    tensors = problem(size, dtype=torch.float32)._replace(gradient=torch.zeros(size))
    tensors.exp_avg.copy_(torch.randn(size) * 2.0 ** torch.randint(-149, 60, (size,)))
    tensors.exp_avg_sq.copy_(torch.rand(size) * 2.0 ** torch.randint(-149, 128, (size,)))
    tensors.exp_avg_sq[:2] = torch.tensor([0.0, float("inf")])
    tensors.parameter[::3] = 0.0
    again = copy(tensors)
    adamw([tensors], REALISTIC)
    adamw_plain(again, REALISTIC)
    assert same(tensors, again)


def drawn_words(seed=0, step=1.0, index=0, first=0, count=9000):
    """Random words that the plain form draws for elements of a parameter."""
    key = seed, torch.tensor(step), index
    elements = torch.arange(first, first + count)
    table = table_of_words(*key)[elements % PERIOD]
    start = first // PERIOD
    return table ^ words_of_periods(*key, start, start + count // PERIOD + 2)[elements // PERIOD - start]


def test_seed_step_parameter_and_element_decide_the_bits():
    base = drawn_words()
    assert torch.equal(drawn_words(), base)
    assert torch.equal(drawn_words(first=4095, count=50), base[4095:4145])
    changed = (
        {"seed": 1},
        {"seed": 1 << 33},
        {"step": 2.0},
        {"index": 1},
        {"first": PERIOD},
        {"first": 1 << 40},
    )
    for change in changed:
        # Among 9000 pairs of 32-bit words, two pairs hardly ever agree by chance.
        assert (drawn_words(**change) == base).sum() <= 1
    assert base.unique().numel() >= 8999


@pytest.mark.parametrize("use", [0, 1])
def test_noise_is_uniform_and_independent_between_periods(use):
    count = 4 * PERIOD
    noise = rounding_noise(drawn_words(count=count), use, out=torch.empty(count, dtype=torch.int32))
    assert noise.min() >= 0
    assert noise.max() < 1 << 16
    centred = (noise.double() + 0.5) / 2**16 - 0.5
    # Means of n uniform numbers between -1/2 and 1/2, and of n products of two: 5 standard deviations.
    assert centred.mean().abs() < 5 * (1 / 12 / count) ** 0.5
    periods = centred.view(4, PERIOD)
    products = (periods @ periods.T / PERIOD - torch.eye(4) / 12).abs()
    assert products.max() < 5 * 12**-1 * PERIOD**-0.5
    signs = (periods > 0).double() * 2 - 1
    assert (signs @ signs.T / PERIOD - torch.eye(4)).abs().max() < 5 * PERIOD**-0.5


def test_noise_of_moments_and_weights_is_independent():
    words = drawn_words(count=PERIOD)
    first, second = (rounding_noise(words, use, out=torch.empty_like(words)) for use in (0, 1))
    counts = torch.bincount((first >> 13) * 8 + (second >> 13), minlength=64).double()
    expected = PERIOD / 64
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5  # 63 degrees of freedom: the mean plus 5 standard deviations


def test_rounding_errors_of_a_matrix_have_the_norm_of_independent_ones():
    """64 rows share a table, and the multiplication keeps their errors independent.

    Without it, the signs of all errors in two periods would be the same or all opposite, and the norm 2.5
    times as large.
    """
    rows, columns = 1024, 1024
    noise = drawn_words(count=rows * columns)
    errors = (rounding_noise(noise, 0, out=noise).view(rows, columns) < 1 << 15).float() - 0.5
    # For independent signs, the norm is sqrt(rows) + sqrt(columns) within a few percent (Bai & Yin, 1988).
    norm = torch.linalg.matrix_norm(errors, 2) / 0.5 / (rows**0.5 + columns**0.5)
    assert 0.95 < norm < 1.05


@pytest.mark.parametrize("weights", WEIGHTS)
def test_temporary_memory_of_the_plain_form_does_not_grow_with_the_parameter(weights):
    size = 5 * PERIOD + 100
    tensors = problem(size, weights, moments=BF16)
    tensors = tensors._replace(gradient=tensors.gradient.to(BF16))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        adamw([tensors], SETTINGS._replace(weights=weights))
    held = peak = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    # Six float32 buffers of two periods each, an int32 table of one, and a few words per period.
    assert 24 * PERIOD < peak < (6 * 2 + 1) * 4 * PERIOD + 20_000
    assert held == 0


@pytest.mark.parametrize("cut", [16, 4096, 1001])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_shards_are_rounded_like_the_whole_parameter(weights, cut, implementation):
    tensors = problem(5120, weights, moments=BF16)
    settings = EXACT._replace(weights=weights)
    parts = [part(tensors, 0, cut), part(tensors, cut, 5120)]
    adamw(parts, settings)
    adamw([tensors], settings)
    for name in ("parameter", "exp_avg", "exp_avg_sq", "residue"):
        expected = getattr(tensors, name)
        if expected is not None:
            assert torch.equal(torch.cat([getattr(one, name) for one in parts]), expected)


# Many tensors, of many sizes and dtypes.


@pytest.mark.parametrize("weights", WEIGHTS)
def test_tensors_of_many_sizes_and_dtypes_can_be_updated_together(weights, implementation):
    together = [
        problem(size, weights, dtype, moments, index)
        for index, (size, dtype, moments) in enumerate(
            [
                (0, BF16, BF16),
                (1, BF16, BF16),
                (16, BF16, BF16),
                (33, BF16, torch.float32),
                (64, torch.float32, BF16),
            ]
        )
    ]
    shifted = problem(65, weights, moments=BF16, index=9)
    views = [x[1:] if isinstance(x, torch.Tensor) and x.dim() else x for x in shifted]
    together.append(AdamWTensors(*views))  # contiguous, but 2 bytes off the alignment of a vector load
    alone = [copy(one) for one in together]
    settings = SETTINGS._replace(weights=weights)
    adamw(together, settings)
    for one in alone:
        adamw([one], settings)
    assert all(same(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_gradients_may_have_any_dtype(dtype, implementation):
    tensors = problem(100)
    again = copy(tensors)
    adamw([tensors._replace(gradient=tensors.gradient.to(dtype))], SETTINGS)
    adamw([again], SETTINGS)  # few bits, exact in every dtype
    assert same(tensors._replace(gradient=again.gradient), again)


def test_the_factor_scales_gradients_without_modifying_them(implementation):
    tensors = problem(100)
    scaled = copy(tensors, gradient=tensors.gradient * 0.25)
    before = tensors.gradient.clone()
    adamw([tensors], SETTINGS, torch.tensor(0.25))
    adamw([scaled], SETTINGS)
    assert torch.equal(tensors.gradient, before)
    assert same(tensors._replace(gradient=scaled.gradient), scaled)


@pytest.mark.parametrize("found", [0.0, 1.0, 2.0])
def test_nothing_changes_if_an_inf_was_found(found, implementation):
    tensors = problem(100, "master", moments=BF16)
    before, stepped = copy(tensors), copy(tensors)
    settings = SETTINGS._replace(weights="master")
    adamw([tensors], settings, found_inf=torch.tensor(found))
    adamw([stepped], settings)
    assert same(tensors, before if found else stepped)


def test_autograd_detects_that_a_parameter_has_changed(implementation):
    tensors = problem(100)
    before = tensors.parameter._version
    adamw([tensors], SETTINGS)
    assert tensors.parameter._version > before


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"parameter": torch.zeros(8, dtype=torch.float16)}, TypeError, "a parameter is torch.float16"),
        ({"gradient": torch.zeros(8, dtype=torch.int32)}, TypeError, "a gradient is torch.int32"),
        ({"gradient": torch.zeros(9)}, ValueError, r"found \(9,\) for a parameter of \(8,\)"),
        ({"gradient": torch.zeros(16)[::2]}, ValueError, "not contiguous"),
        ({"gradient": torch.zeros(8, device="meta")}, ValueError, "on cpu and on meta"),
        ({"exp_avg": torch.zeros(8, dtype=torch.float64)}, TypeError, "a moment is torch.float64"),
        (
            {"exp_avg": torch.zeros(8, dtype=BF16)},
            TypeError,
            "the moments are torch.bfloat16 and torch.float32",
        ),
        ({"step": torch.zeros(8)}, TypeError, "expected one float32 number"),
        ({"residue": torch.zeros(8, dtype=BF16)}, TypeError, "plain has None"),
    ],
)
def test_incompatible_inputs_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        adamw([problem(8)._replace(**changes)], SETTINGS)
    with pytest.raises(ValueError, match="expected one of stochastic, compensated"):
        adamw([problem(8)], SETTINGS._replace(weights="kahan"))


@pytest.mark.gpu
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("moments", [torch.float32, BF16])
def test_on_a_gpu_it_matches_the_plain_twin_within_rounding(weights, moments, assert_near):
    for size, offset in ((5003, 0), (1 << 20, 4096), (3 << 10, 16), (70_001, 5)):
        for dtype in (BF16, torch.float32):
            tensors = problem(size, weights, dtype, moments, offset=offset)
            settings = EXACT._replace(weights=weights)
            on_gpu = AdamWTensors(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in tensors))
            adamw([on_gpu], settings)
            adamw_plain(tensors, settings)
            on_gpu = AdamWTensors(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in on_gpu))
            # Moments are exact, and so are the random bits that round them.
            assert torch.equal(on_gpu.exp_avg, tensors.exp_avg)
            assert torch.equal(on_gpu.exp_avg_sq, tensors.exp_avg_sq)
            # A GPU's root and quotient are off by up to three ulps together, for a step below 1.
            if dtype == torch.float32 or weights == "master":
                assert_near(whole(on_gpu), whole(tensors), 12)
            else:  # rounding may then rarely go the other way
                assert (on_gpu.parameter != tensors.parameter).float().mean() < 1e-3
                assert_near(on_gpu.parameter, tensors.parameter.float(), 2)


@pytest.mark.gpu
def test_on_a_gpu_a_parameter_may_have_more_elements_than_32_bits_count():
    size = 2**31 + 4099
    fill = torch.ones(size, dtype=BF16, device="cuda")
    tensors = AdamWTensors(fill, fill.clone(), fill.clone(), fill.clone(), torch.tensor(9.0).cuda(), None, 0)
    adamw([tensors], EXACT._replace(lr=2.0**-3, weights="plain"))
    assert torch.equal(tensors.parameter, tensors.parameter[:1].expand(size))
    assert tensors.parameter[-1].item() < 1


def test_the_sum_of_squares_covers_all_elements(implementation):
    tensors = [torch.randn(5000).to(BF16), torch.randn(70_000), torch.randn(0), torch.randn(3, 5).T]
    tensors += [torch.randn(33).half(), torch.randn(65).to(BF16)[1:]]
    true = sum(tensor.double().square().sum() for tensor in tensors)
    found = sum_of_squares(tensors)
    # 70,000 squares in float32, summed in many lanes: at most hundreds of roundings in a row.
    assert abs(found.item() - true.item()) <= 600 * 2.0**-24 * true.item()
    assert found.dtype == torch.float64
    assert sum_of_squares(tensors[2:3]).item() == 0
