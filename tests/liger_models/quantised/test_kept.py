"""Linear layers that keep the bits of a quantised checkpoint compute what dense ones do, under adapters."""

from __future__ import annotations

import warnings

import pytest
import torch
from published import CASES
from safetensors.torch import load_file

import liger_models
from liger_models.convert.errors import CheckpointError, ConfigError, UnsupportedModelError
from liger_models.layers.projections.stored_linear import StoredLinear
from liger_models.models.stored_weights import decode_stored

peft = pytest.importorskip("peft")

KEPT = [
    "float8 blocks",
    "float8 blocks, e8m0 scales",
    "float8, one scale a matrix",
    "fbgemm",
    "nvfp4 of compressed-tensors",
    "mxfp4 of compressed-tensors",
    "int4, one scale a row",
    "int8 of bitsandbytes",
]
REFUSED = ["mxfp4", "float8 blocks, experts one by one", "int4, asymmetric", "int4, ordered columns", "nf4"]


def load(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that scales of activations are ignored
        return liger_models.from_hub(folder, device="cpu", **{"projections": "split", **options})


def with_adapters(model):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]  # gate_proj has none
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=targets))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape) * 0.1
    return model


def step(model):
    ids = torch.arange(18).view(2, 9) + 3
    out = model(input_ids=ids, labels=ids)
    logits = model(input_ids=ids).logits.detach()
    out.loss.backward()
    return logits, out.loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def float8(tmp_path_factory):
    return CASES["float8 blocks"](tmp_path_factory.mktemp("kept") / "checkpoint")


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.float32) for case in KEPT), (KEPT[0], "auto"), (KEPT[4], "auto")]
)
def test_logits_loss_and_gradients_are_those_of_the_dense_model(case, dtype, tmp_path):
    checkpoint = CASES[case](tmp_path / "checkpoint")
    kept, dense = (load(checkpoint.folder, dtype=dtype, keep_quantised=keep) for keep in (True, False))
    matrices = dict(dense.named_parameters())
    stored = {path: m for path, m in kept.named_modules() if isinstance(m, StoredLinear)}
    assert len(stored) == len(checkpoint.quantised)
    assert kept.num_parameters() == dense.num_parameters()
    for path, layer in stored.items():
        assert torch.equal(layer.as_dense(layer.decoded_dtype).weight, matrices[f"{path}.weight"]), path
    kept, dense = with_adapters(kept), with_adapters(dense)
    (logits, loss, grads), (expected, expected_loss, expected_grads) = step(kept), step(dense)
    # Products of the same matrices in other layouts of memory may add in another order.
    tolerance = {"rtol": 2**-5, "atol": 2**-5} if dtype == "auto" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(logits, expected, **tolerance)
    torch.testing.assert_close(loss, expected_loss, **tolerance)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        scale = grad.abs().max().clamp_min(1e-6)
        torch.testing.assert_close(grads[name] / scale, grad / scale, **tolerance)


def test_the_model_holds_the_bytes_of_the_file(float8):
    kept, dense = (load(float8.folder, keep_quantised=keep) for keep in (True, False))
    held, whole = (sum(x.nbytes for x in m.saved_tensors().values()) for m in (kept, dense))
    assert held == sum(x.nbytes for x in float8.tensors.values())
    codes = sum(float8.dense[name].numel() for name in float8.quantised)
    grids = held + codes - whole  # the scales
    assert 0 < grids < codes / 16


def test_no_dense_matrix_is_kept_for_the_backward_pass(float8):
    model = with_adapters(load(float8.folder, keep_quantised=True))
    shapes = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, StoredLinear)}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        step(model)
    dtypes = {x.dtype for x in kept if {tuple(x.shape), tuple(x.shape)[::-1]} & shapes}
    assert dtypes == {torch.uint8}


def test_casts_of_the_model_leave_the_bits_alone(float8):
    kept = load(float8.folder, keep_quantised=True)
    before = [m.as_dense(torch.float32).weight for m in kept.modules() if isinstance(m, StoredLinear)]
    kept.half().float()
    after = [m.as_dense(torch.float32).weight for m in kept.modules() if isinstance(m, StoredLinear)]
    assert all(map(torch.equal, before, after))


def test_a_decoded_model_is_saved_as_the_dense_one(float8, tmp_path):
    kept = load(float8.folder, keep_quantised=True)
    with pytest.raises(CheckpointError, match=r"keeps the quantised bits .*decode_stored"):
        kept.save_pretrained(tmp_path / "out")
    with pytest.raises(CheckpointError, match="keeps the quantised bits"):
        dict(kept.checkpoint_tensors())
    decode_stored(kept)
    kept.save_pretrained(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[n], x) for n, x in float8.expected(torch.bfloat16).items())


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_cannot_be_kept_are_refused_by_name(case, tmp_path):
    checkpoint = CASES[case](tmp_path / "checkpoint")
    with pytest.raises(UnsupportedModelError, match=r"_proj.*cannot be kept quantised.*omit keep_quantised"):
        load(checkpoint.folder, keep_quantised=True)


def test_what_kept_weights_cannot_do_is_an_error(float8, tmp_path):
    with pytest.raises(ConfigError, match="pass 'split'"):
        load(float8.folder, keep_quantised=True, projections="fused")
    with pytest.raises(ConfigError, match="cannot be combined with shard"):
        load(float8.folder, keep_quantised=True, shard=lambda model: None)
    with pytest.raises(ConfigError, match="cannot be combined with float8"):
        load(float8.folder, keep_quantised=True, float8="rowwise")
    load(float8.folder).save_pretrained(tmp_path / "dense")
    with pytest.raises(ConfigError, match="this checkpoint has none"):
        load(tmp_path / "dense", keep_quantised=True)
    kept = load(float8.folder, keep_quantised=True)
    with pytest.raises(RuntimeError, match="floating point"):
        kept.requires_grad_(True)
    with pytest.raises(ValueError, match="cannot be"):
        kept.fuse_projections()
    layer = kept.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.bfloat16(), requires_grad=False)
    with pytest.raises(TypeError, match="expected the codes"):
        layer(torch.zeros(1, layer.in_features, dtype=torch.bfloat16))


def test_a_scale_that_is_not_positive_is_an_error(tmp_path):
    checkpoint = CASES["float8 blocks"](tmp_path / "checkpoint")
    name = f"{checkpoint.quantised[0]}_scale_inv"
    checkpoint.write(**{name: -checkpoint.tensors[name]})
    with pytest.raises(CheckpointError, match=name):
        load(checkpoint.folder, keep_quantised=True)
