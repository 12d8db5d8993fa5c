"""FLOP counts of a step."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import liger_models
from liger_models.architectures import find_architecture
from liger_models.kernels.attention.visible_keys import visible_keys
from liger_models.training.observing.flops import StepFlops, measure_peak, visible_pairs


def tiny(family):
    return liger_models.from_config(dict(find_architecture(family).tiny), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3", "gemma4_text"])
def test_matrix_flops_match_torchs_counter(family):
    model, tokens = tiny(family), 24
    ids = torch.randint(5, 20, (1, tokens))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, labels=ids)
    counts = {str(operation): count for operation, count in counter.get_flop_counts()["Global"].items()}
    flops = StepFlops(model)
    flops.mixing.widths.clear()  # attention's products are not called mm
    forward = counts["aten.mm"] + counts.get("aten.addmm", 0)
    assert flops.of(torch.tensor([10, 14]), tokens - 1) == 3 * forward
    flops.below_adapters(1000)
    assert flops.of(torch.tensor([10, 14]), tokens - 1) == 2 * forward + 6 * 1000 * tokens


@pytest.mark.parametrize(
    "frozen", [["layers.1.mlp", "lm_head"], ["embed_tokens", "layers.0"], ["embed_tokens", "layers.0-1.mlp"]]
)
def test_frozen_matrices_count_as_torch_counts_the_products_of_a_step(frozen):
    model, tokens = tiny("llama"), 24
    model.freeze(*frozen)
    ids = torch.randint(5, 20, (1, tokens))
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    counts = {str(operation): count for operation, count in counter.get_flop_counts()["Global"].items()}
    products = counts["aten.mm"] + counts.get("aten.addmm", 0)
    flops = StepFlops(model)
    for mixing in (flops.mixing, flops.idle_mixing):
        mixing.widths.clear()  # attention's products are not called mm
    in_place = 2 * (flops.head - flops.frozen_head) * (tokens - 1)  # addmm_ of the head's gradient, uncounted
    assert flops.of(torch.tensor([10, 14]), tokens - 1) == products + in_place
    whole = tiny("llama")
    without = StepFlops(whole).of(torch.tensor([24]), 23) - StepFlops(model).of(torch.tensor([24]), 23)
    attention = whole.spec.blocks[0].mixer
    width, pairs = attention.num_attention_heads * 2 * attention.head_dim, 24 * 25 // 2
    left_out = 2 * (flops.frozen + flops.idle) * 24 + 2 * flops.frozen_head * 23
    assert without == left_out + (4 * width * pairs if "layers.0" in frozen else 0)


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (5, None), (None, 4), (3, 4), (100, 100)])
def test_query_key_pairs_match_the_mask(window, chunk):
    lengths = [1, 4, 13, 8]
    pieces = [min(chunk or n, n - at) for n in lengths for at in range(0, n, chunk or n)]
    expected = sum(int(visible_keys(n, None, window, "cpu").sum()) for n in pieces)
    assert visible_pairs(torch.tensor(lengths), window, chunk) == expected


def test_attention_flops_are_summed_over_documents_and_heads():
    model = tiny("llama")
    flops, spec = StepFlops(model), model.spec.blocks[0].mixer
    one, two = flops.of(torch.tensor([20]), 5), flops.of(torch.tensor([10, 10]), 5)
    width = len(model.layers) * spec.num_attention_heads * 2 * spec.head_dim
    assert one - two == 3 * 2 * width * (20 * 21 // 2 - 2 * (10 * 11 // 2))


def test_the_peak_of_a_device_is_measured():
    assert measure_peak(torch.device("cpu"), torch.float32) > 1e6
