"""Linear layers in float8, on a CPU with emulated products, and on a GPU."""

import copy

import pytest
import torch
from torch.nn import functional as F

import liger_models
from liger_models import set_float8
from liger_models.convert.errors import ConfigError
from liger_models.kernels import quantize
from liger_models.layers.projections.float8 import RECIPES, runs_in_float8
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.models.float8 import gains_from_float8

CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
IDS = torch.arange(60).view(2, 30)


def make_model(recipe: str | None = None, **options):
    torch.manual_seed(0)
    model = liger_models.from_config(CONFIG, dtype="bfloat16", device="cpu", **options)
    if recipe is not None:
        set_float8(model, recipe, emulate=True, all_sizes=True)
    return model


def gradients(model, **options) -> torch.Tensor:
    model.zero_grad()
    model(IDS, labels=IDS, **options).loss.backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters()])


def by_rows(x, dtype=torch.float8_e4m3fn, one_scale=False):
    return quantize(x, dtype=dtype, one_scale=one_scale)[0].dequantized()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
def test_each_product_is_that_of_its_operands_quantised(recipe, bias):
    torch.manual_seed(0)
    layer = Linear(32, 48, bias=bias).bfloat16()
    set_float8(
        torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])}), recipe, emulate=True, all_sizes=True
    )
    x = torch.randn(3, 7, 32).bfloat16().requires_grad_()
    dy = torch.randn(3, 7, 48).bfloat16()
    y = layer(x)
    y.backward(dy)
    one = recipe == "tensorwise"
    rows, weight, upstream = x.detach().flatten(0, 1), layer.weight.detach(), dy.flatten(0, 1)
    narrow = torch.float8_e5m2 if one else torch.float8_e4m3fn
    expected = by_rows(rows, one_scale=one) @ by_rows(weight, one_scale=one).T
    expected = expected.bfloat16() if layer.bias is None else expected.bfloat16() + layer.bias
    assert torch.equal(y.flatten(0, 1), expected)
    dx = by_rows(upstream, narrow, one) @ by_rows(weight.T, one_scale=one).T
    assert torch.equal(x.grad.flatten(0, 1), dx.bfloat16())
    if recipe == "rowwise_with_gw_hp":
        dw = upstream.T @ rows
    else:  # padded as on a GPU, which leaves the sums as they are
        pad = (0, -len(rows) % 16)
        dw = by_rows(F.pad(upstream.T, pad), narrow, one) @ by_rows(F.pad(rows.T, pad), one_scale=one).T
    torch.testing.assert_close(layer.weight.grad, dw.bfloat16(), rtol=2**-8, atol=1e-6)
    if bias:
        torch.testing.assert_close(layer.bias.grad, upstream.sum(0), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_level_gives_the_same_bits_on_a_cpu(recipe):
    model = make_model(recipe)
    expected = gradients(model)
    for level in LEVELS if recipe == "rowwise" else ("all", "checkpoint", "tiled"):
        if level != "offload":  # needs a GPU
            model.set_activation_memory(level)
            assert torch.equal(gradients(model), expected), level


def test_tiles_do_not_bypass_float8(monkeypatch):
    monkeypatch.setattr("liger_models.layers.recompute.tiles.TILE", 16)
    model = make_model("rowwise", activation_memory="tiled")
    assert torch.equal(gradients(model), gradients(make_model("rowwise")))


def test_it_is_not_the_products_of_bfloat16():
    exact, found = gradients(make_model()), gradients(make_model("rowwise"))
    distance = float((found - exact).norm() / exact.norm())
    assert 0.01 < distance < 0.1  # e4m3 rounds by up to 2^-4, on average over many terms by about 3%


def test_none_restores_the_layers_own_products():
    model = make_model("rowwise")
    set_float8(model, None)
    assert torch.equal(gradients(model), gradients(make_model()))


def test_layers_are_chosen_by_their_shapes():
    assert gains_from_float8(4096, 6144)
    assert gains_from_float8(1024, 1024)
    assert not gains_from_float8(4096, 512)
    wide = {
        **CONFIG,
        "hidden_size": 2048,
        "intermediate_size": 2056,
        "head_dim": 128,
        "num_attention_heads": 16,
    }
    model = liger_models.from_config(wide, dtype="bfloat16", device="meta")
    chosen = set_float8(model, "rowwise")
    assert chosen["layers.0.self_attn.qkv_proj"] == "float8"
    assert "multiple of 16" in chosen["layers.0.mlp.down_proj"]
    assert not any("lm_head" in path or "embed" in path for path in chosen)
    assert not runs_in_float8(model.lm_head)
    assert "small" in set_float8(make_model(), "rowwise")["layers.0.self_attn.o_proj"]


def test_split_and_fused_projections_keep_it():
    model = make_model("rowwise")
    model.split_projections()
    assert all(runs_in_float8(model.layers[0].self_attn.get_submodule(name)) for name in ("q_proj", "k_proj"))
    # Rows are quantised one by one, so that y does not change; columns of W and the sums of dx do.
    assert gradients(model).isfinite().all()
    model.fuse_projections()
    assert torch.equal(gradients(model), gradients(make_model("rowwise")))


def test_the_layers_below_adapters_run_in_float8():
    peft = pytest.importorskip("peft")
    losses = []
    for recipe in (None, "rowwise"):
        model = make_model(recipe, projections="split")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        output = adapted(IDS, labels=IDS)
        output.loss.backward()
        trained = [p for p in adapted.parameters() if p.requires_grad]
        assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
        losses.append(output.loss.item())
    plain = make_model("rowwise", projections="split")
    assert losses[1] == plain(IDS, labels=IDS).loss.item()  # B is zero at first
    assert losses[0] != losses[1]


def test_autocast_of_float32_weights():
    model = make_model().float()
    set_float8(model, "rowwise", emulate=True, all_sizes=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_copy_and_a_checkpoint_of_weights_do_not_mix_it_up(tmp_path):
    model = make_model("rowwise")
    assert torch.equal(gradients(copy.deepcopy(model)), gradients(model))
    model.save_pretrained(tmp_path)
    again = liger_models.from_hub(tmp_path, device="cpu")
    assert not any(runs_in_float8(layer) for layer in again.modules())
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_machines_and_dtypes_that_cannot_are_told():
    with pytest.raises(ConfigError, match="compute capability"):
        make_model(float8="rowwise")
    with pytest.raises(ConfigError, match="must be one of rowwise"):
        make_model(float8="rows")
    with pytest.raises(ConfigError, match="dtype='bfloat16'"):
        liger_models.from_config(CONFIG, dtype="float32", device="meta", float8="rowwise")
    model = make_model()
    set_float8(model, "rowwise", all_sizes=True)
    with pytest.raises(RuntimeError, match=r"set_float8\(None\)"):
        model(IDS)
    with pytest.raises(ValueError, match="expected one of rowwise"):
        set_float8(model, "mxfp8")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_a_gpu_gradients_are_those_of_emulated_products(recipe):
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 512}
    model = liger_models.from_config({**CONFIG, **sizes}, dtype="bfloat16", device="cuda", float8=recipe)
    ids = torch.randint(0, 512, (1, 60), device="cuda")

    def run() -> torch.Tensor:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return torch.cat([p.grad.float().flatten() for p in model.parameters()])

    found = run()
    set_float8(model, recipe, emulate=True)
    emulated = run()
    set_float8(model, None)
    exact = run()
    distance = float((emulated - exact).norm())
    assert float((found - emulated).norm()) < 0.5 * distance
    assert 0.9 * distance < float((found - exact).norm()) < 1.1 * distance
