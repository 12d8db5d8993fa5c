"""Linear layers in float8, on a CPU with emulated products, and on a GPU."""

import copy
from collections import Counter

import pytest
import torch
from live_bytes import LiveBytes, as_on_a_gpu
from torch.nn import functional as F

import liger_models
from liger_models import keep_float8_weights, set_float8
from liger_models.convert.errors import ConfigError
from liger_models.kernels import quantize
from liger_models.kernels.float8 import copies
from liger_models.layers.projections.float8 import RECIPES, Float8Settings, runs_in_float8
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.low_rank import low_rank_linear, projection_of
from liger_models.layers.projections.low_rank_plan import Adapter
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
    wide = torch.promote_types(model.dtype, torch.float32)
    return torch.cat([p.grad.to(wide).flatten() for p in model.parameters()])


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


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_as_far_from_float64_as_their_operands_are_rounded(recipe):
    """A matrix of e4m3 numbers is 2.7% away from its own (the root mean square of a rounding error of up to
    2^-4, for numbers of which all significands are as likely), one of e5m2 twice as far. Errors of all
    products on the way to a gradient, 4 a layer and pass, add as if they were independent.
    """
    exact = gradients(make_model().double()).double()

    def distance(model) -> float:
        return float((gradients(model).double() - exact).norm() / exact.norm())

    operand = 0.0265 * (1.5 if recipe == "tensorwise" else 1.0)
    products = 2 * 4 * CONFIG["num_hidden_layers"]
    in_bfloat16, in_float8 = distance(make_model()), distance(make_model(recipe))
    assert 2**-9 / 2 < in_bfloat16 < 2**-9 * (2 * products) ** 0.5
    assert 4 * in_bfloat16 < in_float8 < operand * (2 * products) ** 0.5


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


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted_gradients(recipe, monkeypatch, one_by_one=False, **options):
    peft = pytest.importorskip("peft")
    model = make_model(recipe, projections="split")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=ALL, init_lora_weights=False, **options)
    adapted = peft.get_peft_model(model, config)
    if one_by_one:
        from liger_models.hf.adapters.lora import LowRankLinear

        monkeypatch.setattr(LowRankLinear, "low_rank_projection", lambda self: None)
    torch.manual_seed(2)
    adapted(IDS, labels=IDS).loss.backward()
    return torch.cat([p.grad.float().flatten() for p in adapted.parameters() if p.requires_grad])


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_adapters_and_layers_in_float8_run_as_one_operation(recipe, monkeypatch):
    """Layers of one input are one product there, and dx is quantised once for all: not the same bits."""
    exact = adapted_gradients(None, monkeypatch)
    together = adapted_gradients(recipe, monkeypatch)
    apart = adapted_gradients(recipe, monkeypatch, one_by_one=True)
    distance = float((together - exact).norm())
    assert float((together - apart).norm()) < distance
    assert 0.8 * distance < float((apart - exact).norm()) < 1.25 * distance


def test_adapters_alone_add_to_what_the_layer_computes_in_float8():
    """One layer with a path and a bias: y and all gradients from their formulas."""
    torch.manual_seed(0)
    layer = Linear(32, 48, bias=True).bfloat16().requires_grad_(False)
    layer.float8 = Float8Settings("rowwise", emulate=True)
    a, b = torch.randn(4, 32, requires_grad=True), torch.randn(48, 4, requires_grad=True)
    x, dy = torch.randn(21, 32).bfloat16().requires_grad_(), torch.randn(21, 48).bfloat16()
    path = Adapter(a, b, 0.5)
    y = low_rank_linear(x, projection_of(layer)._replace(adapters=(path,)))
    y.backward(dy)
    plain_x = x.detach().clone().requires_grad_()
    expected = layer(plain_x)
    t = 0.5 * (x.detach() @ a.detach().bfloat16().T).float()
    torch.testing.assert_close(y.float(), expected.float() + t @ b.detach().T, rtol=2**-6, atol=0.1)
    expected.backward(dy)
    u = 0.5 * dy.float() @ b.detach()
    torch.testing.assert_close(x.grad.float(), plain_x.grad.float() + u @ a.detach(), rtol=2**-6, atol=0.2)
    torch.testing.assert_close(b.grad, dy.float().T @ t, rtol=2**-5, atol=0.2)
    torch.testing.assert_close(a.grad, u.T @ x.detach().float(), rtol=2**-5, atol=0.5)


@pytest.mark.parametrize("level", ["all", "lean", "mlp", "checkpoint"])
def test_less_is_kept_than_in_bfloat16(level):
    """And as much as the planner of activation memory expects of a layer, or less."""
    kept = {}
    for recipe in (None, "rowwise"):
        living = []
        for layers in (2, 3):
            torch.manual_seed(0)
            config = {**CONFIG, "num_hidden_layers": layers}
            model = liger_models.from_config(config, dtype="bfloat16", device="cpu", activation_memory=level)
            if recipe:
                set_float8(model, recipe, emulate=True, all_sizes=True)
            with as_on_a_gpu():
                model(IDS[:, :1])  # creates data shared by all models
                with LiveBytes(model.parameters()) as live:
                    loss = model(IDS, labels=IDS).loss
                living.append(live.now)
                del loss
        kept[recipe] = (living[1] - living[0]) / IDS.numel()
        planned = model.layers[0].activation_bytes(level, 2)
        assert kept[recipe] <= planned if recipe and level == "all" else kept[recipe] == planned
    saved = {"all": 4 * 48, "lean": 2 * 48 - 4}.get(level, 0)  # gate and up are codes, with a scale for each
    assert kept[None] - kept["rowwise"] >= saved


def test_a_copy_is_quantised_once_for_all_its_products(monkeypatch):
    """Norms and gated products quantise their own outputs; a layer quantises the other operands."""
    counts: Counter[tuple[int, ...]] = Counter()

    def count(x, **options):
        counts[tuple(x.shape)] += options.get("by_rows", True)
        return quantize(x, **options)

    monkeypatch.setattr("liger_models.layers.projections.float8.quantize", count)
    gradients(make_model("rowwise"))
    tokens = IDS.numel()
    # Per layer: attention's output, in both passes, and the gradients of both branches. (Kernels of norms
    # make these, too, but the plain twins do not.) The gradients of queries, keys and values.
    expected = {(tokens, 32): 2 * 4, (tokens, 64): 2}
    assert {shape: n for shape, n in counts.items() if shape[0] == tokens} == expected


def test_an_edit_of_a_layers_input_is_seen():
    """The copy belongs to the norm's output, and is not used for a tensor that a hook has edited."""

    def double(module, args):
        args[0].mul_(2)

    def doubled(module, args):
        return (args[0] * 2,)

    found = []
    for hook in (double, doubled):
        model = make_model("rowwise")
        for layer in model.layers:
            layer.mlp.gate_up_proj.register_forward_pre_hook(hook)
            layer.mlp.down_proj.register_forward_pre_hook(hook)
        found.append(gradients(model))
    assert torch.equal(*found)
    assert not torch.equal(found[0], gradients(make_model("rowwise")))


def test_copies_do_not_outlive_a_step():
    before = set(copies._COPIES)
    for level in ("all", "lean", "checkpoint"):
        model = make_model("rowwise", activation_memory=level)
        gradients(model)
        assert set(copies._COPIES) <= before, level


def test_a_compiled_layer_computes_the_same():
    torch.manual_seed(0)
    layer = Linear(32, 48).bfloat16()
    layer.float8 = Float8Settings("rowwise", emulate=True)
    x = torch.randn(5, 32).bfloat16()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


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


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_weights_are_cast_once_for_all_micro_batches(recipe, monkeypatch):
    """With the bits of casting them each time; one that is modified in between is cast again."""
    model = make_model(recipe, activation_memory="checkpoint")  # which runs layers again
    weights = [p for p in model.layers.parameters() if p.dim() == 2]
    casts = Counter()

    def counted(x, **options):
        casts.update(name for name in weights_of if name is not None and x.data_ptr() == name)
        return quantize(x, **options)

    weights_of = [p.data_ptr() for p in weights]
    monkeypatch.setattr("liger_models.layers.projections.float8.quantize", counted)

    def micro_batches():
        model.zero_grad()
        for start in (0, 10, 20):
            model(IDS[:, start : start + 10], labels=IDS[:, start : start + 10]).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = micro_batches()
    assert set(casts.values()) == {9}  # twice by rows, and by columns
    casts.clear()
    with keep_float8_weights(model):
        found = micro_batches()
        assert casts == dict.fromkeys(weights_of, 2)
        with torch.no_grad():
            weights[0].mul_(2)
        changed = micro_batches()
    assert casts == dict.fromkeys(weights_of, 2) | {weights_of[0]: 4}
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, changed, micro_batches()))
    assert not all(map(torch.equal, changed, found))


def test_frozen_weights_below_adapters_are_cast_once(monkeypatch):
    peft = pytest.importorskip("peft")
    casts = []
    monkeypatch.setattr(
        "liger_models.layers.projections.float8.quantize",
        lambda x, **options: casts.append(x.shape) or quantize(x, **options),
    )
    config = peft.LoraConfig(r=4, target_modules=ALL, init_lora_weights=False)
    adapted = peft.get_peft_model(make_model("rowwise", projections="split"), config)

    def micro_batches():
        casts.clear()
        adapted.zero_grad()
        for start in (0, 10, 20):
            adapted(IDS[:, start : start + 10], labels=IDS[:, start : start + 10]).loss.backward()
        return [p.grad.clone() for p in adapted.parameters() if p.requires_grad], len(casts)

    expected, each_time = micro_batches()
    with keep_float8_weights(adapted):
        found, once = micro_batches()
    assert all(map(torch.equal, found, expected))
    # Four matrices a layer (query, key and value are one), each by rows and by columns; the input of the
    # first needs no gradient.
    assert each_time - once == 2 * (2 * 4 * CONFIG["num_hidden_layers"] - 1)
