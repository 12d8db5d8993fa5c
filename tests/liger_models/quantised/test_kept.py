"""Linear layers that keep the bits of a quantised checkpoint compute what dense ones do, under adapters."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from published import CASES, blocks
from published import EXPERTS as EXPERTS_CONFIG
from quantised_files import QuantisedCheckpoint, float8_blocks
from safetensors.torch import load_file
from torch.nn.utils import parametrize

import liger_models
from liger_models.convert.errors import CheckpointError, ConfigError, UnsupportedModelError
from liger_models.kernels import quantize
from liger_models.layers.projections import stored_weight
from liger_models.layers.projections.stored_linear import StoredLinear
from liger_models.layers.projections.stored_weight import kept_weights
from liger_models.models.float8 import set_float8
from liger_models.models.stored_weights import decode_stored
from liger_models.training.adapters.lora_settings import LoraSettings
from liger_models.training.lora import Adapters
from liger_models.training.observing.rounding import describe_rounding

peft = pytest.importorskip("peft")

LINEAR = [
    "float8 blocks",
    "float8 blocks, float4 experts (DeepSeek-V4)",
    "float8, one scale a matrix",
    "fbgemm",
    "nvfp4 of compressed-tensors",
    "mxfp4 of compressed-tensors",
    "int4, one scale a row",
    "int4, asymmetric",
    "int4, ordered columns",
    "int8 of compressed-tensors, asymmetric",
    "int8 of bitsandbytes",
    "nf4",
    "nf4, nested",
    "fp4 in bfloat16 storage",
]
EXPERTS = [
    "mxfp4",
    "float8 blocks, experts one by one",
    "float8 blocks, stacked experts",
    "nvfp4 of modelopt",
    "int4, groups, experts (Kimi K2)",
    "nf4, nested, experts",
]


TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")  # gate_proj has none


def load(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that scales of activations are ignored
        return liger_models.from_hub(folder, **{"projections": "split", "device": "cpu", **options})


def stored_modules(model):
    return {path: m for path, m in model.named_modules() if kept_weights(m)}


def with_adapters(model):
    linear = {path for path, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    targets = [path for path in linear if path.endswith(TARGETS)]
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


def dense_shapes(module):
    """The shapes of a module's matrices, and of a single expert's, with dimensions in order of size."""
    shapes = [kept.shape for kept in kept_weights(module).values()]
    return {tuple(sorted(shape[-n:])) for shape in shapes for n in (2, len(shape))}


@pytest.fixture(scope="module")
def float8(tmp_path_factory):
    return CASES["float8 blocks"](tmp_path_factory.mktemp("kept") / "checkpoint")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in [*LINEAR, *EXPERTS]),
        *((case, "auto") for case in (LINEAR[0], LINEAR[4], EXPERTS[0], EXPERTS[3])),
    ],
)
def test_logits_loss_and_gradients_are_those_of_the_dense_model(case, dtype, tmp_path):
    checkpoint = CASES[case](tmp_path / "checkpoint")
    kept, dense = (load(checkpoint.folder, dtype=dtype, keep_quantised=keep) for keep in (True, False))
    matrices = dict(dense.named_parameters())
    stored = stored_modules(kept)
    assert sum(len(kept_weights(m)) for m in stored.values()) == sum(
        bool({ref.name for ref in expr.refs()} & {*checkpoint.quantised})
        for expr in dense.weight_map().values()
    )
    assert kept.num_parameters() == dense.num_parameters()
    for path, module in stored.items():
        for name in kept_weights(module):
            decoded = module.as_dense().get_parameter(name)
            assert torch.equal(decoded, matrices[f"{path}.{name}"]), f"{path}.{name}"
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


@pytest.mark.parametrize("case", ["float8 blocks", "mxfp4"])
def test_no_dense_matrix_is_kept_for_the_backward_pass(case, tmp_path):
    checkpoint = CASES[case](tmp_path / "checkpoint")
    model = with_adapters(load(checkpoint.folder, keep_quantised=True))
    shapes = {shape for m in stored_modules(model).values() for shape in dense_shapes(m)}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        step(model)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}  # other frozen matrices
    found = [x for x in kept if x.is_floating_point() and x.untyped_storage().data_ptr() not in own]
    assert found
    assert not {tuple(sorted(x.shape)) for x in found} & shapes


@pytest.mark.parametrize("level", ["lean", "mlp", "checkpoint"])
def test_stacks_of_experts_are_decoded_one_at_a_time_for_each_product(
    level, tmp_path, interpreted, monkeypatch
):
    """A layer that runs again repeats only the first product."""
    checkpoint = CASES["mxfp4"](tmp_path / "checkpoint")
    model = load(checkpoint.folder, dtype=torch.float32, keep_quantised=True, activation_memory=level)
    model = with_adapters(model)
    decoded, before = [], []
    decode = stored_weight.decode_codes

    def noted(*args, **options):
        before.append([stack() for stack in decoded if stack() is not None])
        dense = decode(*args, **options)
        decoded.append(weakref.ref(dense))
        return dense

    monkeypatch.setattr(stored_weight, "decode_codes", noted)
    ids = torch.arange(3)[None] + 3
    loss = model(input_ids=ids, labels=ids).loss
    assert len(decoded) == 2
    loss.backward()
    assert len(decoded) == (4 if level == "lean" else 5)
    assert not any(before)
    assert not any(dense() is not None for dense in decoded)


def test_casts_of_the_model_leave_the_bits_alone(float8):
    kept = load(float8.folder, keep_quantised=True)
    before = [m.as_dense().weight for m in stored_modules(kept).values()]
    kept.half().float()
    after = [m.as_dense().weight for m in stored_modules(kept).values()]
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


def test_merged_adapters_are_written_in_the_bits_of_the_checkpoint(float8, tmp_path):
    """Layers without an adapter keep theirs."""
    kept = load(float8.folder, keep_quantised=True)
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(kept, config)
    decode_stored(kept)
    merged = adapted.merge_and_unload()
    expected = {name: x.clone() for name, x in merged.checkpoint_tensors()}
    merged.save_pretrained(tmp_path / "dense")
    merged.save_pretrained(tmp_path / "bits", quantization="as_loaded")
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    assert all(torch.equal(dense[name], x) for name, x in expected.items())
    found = {
        name: x for file in (tmp_path / "bits").glob("*.safetensors") for name, x in load_file(file).items()
    }
    assert found.keys() == float8.tensors.keys()
    for name, tensor in float8.tensors.items():
        same = torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
        assert same == ("q_proj.weight" not in name), name
    again = dict(load(tmp_path / "bits").checkpoint_tensors())
    name = "model.layers.0.self_attn.q_proj.weight"
    apart = (again[name].float() - expected[name].float()).abs().max()
    assert 0 < apart <= (16 / 448 + 2**-8) * expected[name].float().abs().max()  # half a step of float8
    assert (expected[name].float() - float8.dense[name]).abs().max() > 4 * apart


@pytest.mark.parametrize(
    ("case", "distance"),
    [("float8 blocks", (1e-3, 2e-3)), ("mxfp4", None), ("float8 blocks, float4 experts (DeepSeek-V4)", None)],
)
def test_the_distance_of_a_bfloat16_export_is_described(case, distance, tmp_path):
    checkpoint = CASES[case](tmp_path / "checkpoint")
    model = load(checkpoint.folder)
    text = describe_rounding(model)
    if distance is None:
        assert text.endswith("which holds them exactly")
    else:
        exact = torch.cat([checkpoint.dense[name].flatten().double() for name in checkpoint.quantised])
        apart = (exact.bfloat16().double() - exact).norm() / exact.norm()
        assert distance[0] < apart < distance[1]
        assert f"will be {apart:.2%}" in text
    model.requires_grad_(False)
    model.embed_tokens.requires_grad_(True)
    assert describe_rounding(model) is None  # quantised weights that do not change
    model.save_pretrained(tmp_path / "dense")
    assert describe_rounding(load(tmp_path / "dense")) is None


def test_experts_in_two_formats_are_refused_by_name(tmp_path):
    makers = {"*.experts.1.up_proj.weight": float8_blocks((8, 8)), "*.experts.*": float8_blocks((32, 24))}
    settings = blocks(32, 24)
    checkpoint = QuantisedCheckpoint.make(tmp_path / "two", EXPERTS_CONFIG, makers, settings)
    with pytest.raises(CheckpointError, match="_scale_inv"):  # a file's format is one: it does not load
        load(checkpoint.folder)
    checkpoint = CASES["nvfp4 of modelopt"](tmp_path / "some")
    name = checkpoint.quantised[0]
    parts = {f"{name}{ending}": None for ending in ("_scale", "_scale_2")}
    checkpoint.tensors = {n: x for n, x in checkpoint.tensors.items() if n not in parts}
    checkpoint.tensors[name] = checkpoint.dense[name].bfloat16()
    checkpoint.write()
    with pytest.raises(UnsupportedModelError, match=r"_proj.*cannot be kept quantised.*omit keep_quantised"):
        load(checkpoint.folder, keep_quantised=True)


def test_adapters_on_experts_in_quantised_bits_are_refused(tmp_path):
    model = load(CASES["mxfp4"](tmp_path / "checkpoint").folder, keep_quantised=True)
    experts = model.layers[0].mlp.experts
    parametrize.register_parametrization(experts, "down_proj", torch.nn.Identity())
    with pytest.raises(TypeError, match="adapt other layers"):
        step(model)


@pytest.mark.parametrize(
    ("case", "level"),
    [*((case, "lean") for case in EXPERTS), (EXPERTS[0], "mlp"), (EXPERTS[0], "checkpoint")],
)
def test_adapters_of_experts_in_quantised_bits_compute_what_dense_ones_do(case, level, tmp_path):
    checkpoint = CASES[case](tmp_path / "checkpoint")
    options = {"dtype": torch.float32, "activation_memory": level}
    models = [load(checkpoint.folder, keep_quantised=keep, **options) for keep in (True, False)]
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=stacks)
    kept, dense = (peft.get_peft_model(model, config) for model in models)
    kept.add_adapter("second", config)
    dense.add_adapter("second", config)
    torch.manual_seed(2)
    for name, parameter in dense.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape) * 0.1
    paths = {name: x for name, x in dense.state_dict().items() if ".lora_" in name}
    assert kept.load_state_dict(paths, strict=False).unexpected_keys == []
    for adapter in ("default", "second"):
        kept.set_adapter(adapter)
        dense.set_adapter(adapter)
        (logits, loss, grads), (expected, expected_loss, expected_grads) = step(kept), step(dense)
        # Products of the same matrices in other layouts of memory may add in another order.
        tolerance = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(logits, expected, **tolerance)
        torch.testing.assert_close(loss, expected_loss, **tolerance)
        assert grads.keys() == expected_grads.keys()
        assert any(".experts." in name for name in grads)
        for name, grad in expected_grads.items():
            scale = grad.abs().max().clamp_min(1e-6)
            torch.testing.assert_close(grads[name] / scale, grad / scale, **tolerance)
    with pytest.raises(ConfigError, match="decode_stored"):
        kept.merge_adapter(safe_merge=True)
    decode_stored(kept.base_model.model)
    logits = [model.merge_and_unload()(input_ids=torch.arange(8)[None] + 3).logits for model in (kept, dense)]
    torch.testing.assert_close(*logits, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("case", EXPERTS)
@pytest.mark.parametrize("level", ["lean", "checkpoint"])
def test_steps_on_a_gpu_over_experts_in_quantised_bits_are_those_of_the_dense_model(case, level, tmp_path):
    checkpoint = CASES[case](tmp_path / "checkpoint")
    found = []
    for keep in (True, False):
        options = {"activation_memory": level, "device": "cuda", "dtype": "float32"}
        model = load(checkpoint.folder, keep_quantised=keep, **options)
        Adapters(model, LoraSettings.parse("r=2,experts"), "base", seed=3)
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.data.normal_(0, 0.1)
        ids, losses = (torch.arange(64, device="cuda").view(2, 32) + 3), []
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.SGD(trained.values(), lr=10.0)
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            gradients = {name: p.grad for name, p in trained.items()}
            optimizer.step()
            optimizer.zero_grad()
        found.append((losses, gradients))
    (losses, gradients), (expected, expected_gradients) = found
    assert abs(losses[2] - losses[0]) > 1e-4  # of random models, with a large step
    # The same matrices in other layouts of memory: products may add in another order.
    assert losses == pytest.approx(expected, rel=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    assert any(".experts." in name for name in gradients)
    for name, grad in expected_gradients.items():
        assert (gradients[name] - grad).norm() <= 1e-3 * grad.norm().clamp_min(1e-6), name


def test_adapters_of_a_run_on_experts_in_quantised_bits_are_written_and_merged_as_dense_ones(tmp_path):
    checkpoint = CASES["nvfp4 of modelopt"](tmp_path / "checkpoint")
    found = []
    for keep in (True, False):
        model = load(checkpoint.folder, keep_quantised=keep, dtype=torch.float32)
        adapters = Adapters(model, LoraSettings.parse("r=2,targets=q_proj,experts"), "base", seed=3)
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.data = torch.ones_like(parameter)
        written = tmp_path / f"adapter {keep}"
        written.mkdir()
        adapters.write(written)
        adapters.merge()
        found.append((load_file(written / "adapter_model.safetensors"), dict(model.checkpoint_tensors())))
    (adapter, merged), (dense_adapter, dense_merged) = found
    assert {n: x.shape for n, x in adapter.items()} == {n: x.shape for n, x in dense_adapter.items()}
    assert merged.keys() == dense_merged.keys()
    name = next(name for name in merged if ".experts." in name)
    assert (merged[name] - checkpoint.dense[name]).abs().max() > 0.01
    assert merged[name].shape == dense_merged[name].shape


def test_products_in_float8_are_those_of_the_decoded_weights(float8):
    """Adapters in both, so that layers of one input are one product in both."""
    kept, dense = (load(float8.folder, dtype="auto", keep_quantised=keep) for keep in (True, False))
    for model in (kept, dense):
        chosen = set_float8(model, "rowwise", emulate=True, all_sizes=True)
        assert chosen["layers.0.mlp.down_proj"] == "float8"
    plain = step(with_adapters(load(float8.folder, dtype="auto", keep_quantised=True)))[1]
    (logits, loss, grads), expected = step(with_adapters(kept)), step(with_adapters(dense))
    assert torch.equal(logits, expected[0])
    assert loss == expected[1]
    assert loss != plain
    for name, gradient in expected[2].items():
        torch.testing.assert_close(
            grads[name], gradient, rtol=2**-6, atol=2**-7 * float(gradient.abs().max())
        )


@pytest.mark.parametrize("case", ["float8, one scale a matrix", "float8 of compressed-tensors, a row"])
def test_codes_with_a_scale_a_row_are_operands_as_they_are(case, tmp_path, monkeypatch):
    model = load(CASES[case](tmp_path / "checkpoint").folder, dtype="bfloat16", keep_quantised=True)
    set_float8(model, "rowwise", emulate=True, all_sizes=True)
    layers = [m for m in stored_modules(model).values() if m.float8 is not None]
    assert layers
    exact = [layer.as_dense().weight.double() for layer in layers]
    monkeypatch.setattr(StoredLinear, "dense", lambda self, weight: pytest.fail("decoded"))
    for layer, weight in zip(layers, exact, strict=True):
        torch.manual_seed(0)
        x = torch.randn(17, layer.in_features).bfloat16().requires_grad_()
        dy = torch.randn(17, layer.out_features).bfloat16()
        y = layer(x)
        y.backward(dy)
        rows = quantize(x)[0].dequantized().double()  # x is rounded to e4m3, and the weight is not
        bias = 0.0 if layer.bias is None else layer.bias.double()
        sizes = rows.abs() @ weight.abs().T + abs(bias)
        assert ((y.double() - rows @ weight.T - bias).abs() <= 2.0**-7 * sizes).all()
        sizes = dy.double().abs() @ weight.abs()
        assert ((x.grad.double() - dy.double() @ weight).abs() <= (2.0**-3 + 2.0**-7) * sizes).all()


def test_adapters_that_may_read_the_codes_are_refused(float8):
    for config in (
        peft.LoraConfig(target_modules=["q_proj"], use_dora=True),
        peft.LoHaConfig(target_modules=["q_proj"]),
        peft.LoraConfig(target_modules=[], target_parameters=["q_proj.weight"]),
    ):
        with pytest.raises(ConfigError, match="may compute with the codes"):
            peft.get_peft_model(load(float8.folder, keep_quantised=True), config)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(load(float8.folder, keep_quantised=True), config)
    for safe in (True, False):
        with pytest.raises(ConfigError, match=r"cannot be merged .*decode_stored"):
            adapted.merge_adapter(safe_merge=safe)


def test_what_kept_weights_cannot_do_is_an_error(float8, tmp_path):
    with pytest.raises(ConfigError, match="pass 'split'"):
        load(float8.folder, keep_quantised=True, projections="fused")
    with pytest.raises(ConfigError, match="compute capability"):
        load(float8.folder, keep_quantised=True, dtype="bfloat16", float8="rowwise")
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


@pytest.mark.parametrize("case", ["float8 blocks", "float8 blocks, experts one by one"])
def test_a_scale_that_is_not_positive_is_an_error(case, tmp_path):
    checkpoint = CASES[case](tmp_path / "checkpoint")
    name = f"{checkpoint.quantised[-1]}_scale_inv"
    checkpoint.write(**{name: -checkpoint.tensors[name]})
    with pytest.raises(CheckpointError, match=name):
        load(checkpoint.folder, keep_quantised=True)
