"""Cards: a family is checked from only its registration, and the pages match their data."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture, list_architectures
from liger_models.cards import card as card_module
from liger_models.cards import checks, pages, peers, results, training_step
from liger_models.cards.card import with_training_step
from liger_models.cards.checks import CHECKS
from liger_models.cards.pictures import picture_of_family
from liger_models.cards.published import (
    Published,
    features,
    layers_of_every_kind,
    published,
    with_layers,
)
from liger_models.cards.results import Card, Line
from liger_models.cards.workshop import NotRun, Workshop
from liger_models.cli import main
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.blocks import BLOCKS
from liger_models.models import verification
from liger_models.pictures.layers import BRANCHES, layers, look

ROOT = Path(__file__).parents[2]
LLAMA = find_architecture("llama")


@pytest.fixture
def repository(tmp_path):
    """Folder with the README of a checkout."""
    (tmp_path / "README.md").write_text("# Models\n")
    return tmp_path


@pytest.fixture
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    pytest.importorskip("transformers")
    return Workshop(LLAMA, tmp_path_factory.mktemp("shop"), ROOT)


# -- making a card


def test_a_card_is_made_from_the_registration(repository, without_a_gpu, capsys):
    pytest.importorskip("transformers")
    assert main(["card", "llama", "--repository", str(repository)]) == 0
    card = Card.read(repository / "docs/families/llama.json")
    assert [line.check for line in card.lines] == list(CHECKS)
    assert [line.passed for line in card.lines] == [True] * 5 + [None]
    page = (repository / "docs/families/llama.md").read_text()
    assert "every byte the same" in page
    assert "72 of 72 tokens the same" in page
    assert "a training step on a GPU: not run (needs a GPU)" in page
    overview = (repository / "docs/families/README.md").read_text()
    assert "](llama.md) | the architecture that most others vary" in overview
    assert "5 of 5 passed" in overview
    assert "llama: greedy generation against transformers: passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "is not a checkout of liger_models; pass one with --repository"),
        (["lama"], "the model type 'lama' is not supported. The nearest: llama"),
    ],
)
def test_impossible_requests_give_one_line_errors(arguments, message, repository, capsys):
    folder = repository if arguments else repository / "elsewhere"
    assert main(["card", *arguments, "--repository", str(folder)]) == 2
    assert message in capsys.readouterr().err
    assert not (repository / "docs").exists()


def failing(monkeypatch, **runs):
    """Replace every check by an empty one, except those in `runs` and the training step."""
    fakes = {
        name: replace(check, run=runs.get(name, lambda shop: (True, {})), say=lambda found: "nothing")
        for name, check in CHECKS.items()
        if check.run is not None
    }
    fakes["training_step"] = CHECKS["training_step"]
    for module in (checks, pages, card_module):
        monkeypatch.setattr(module, "CHECKS", fakes)


def test_a_check_that_raises_an_error_fails_and_the_others_continue(repository, monkeypatch, without_a_gpu):
    pytest.importorskip("transformers")

    def broken(shop):
        raise ValueError("no such layer\nand more")

    failing(monkeypatch, numbers=broken)
    assert main(["card", "llama", "--repository", str(repository)]) == 1
    card = Card.read(repository / "docs/families/llama.json")
    failed = [line for line in card.lines if line.passed is False]
    assert [(line.check, line.values) for line in failed] == [
        ("numbers", {"error": "ValueError: no such layer"})
    ]
    assert "**failed** | ValueError: no such layer |" in (repository / "docs/families/llama.md").read_text()


def test_results_this_machine_cannot_produce_keep_their_date_and_machine():
    line = Line("training_step", True, {"model": "x"}, "command", "2026-01-02", "GPU", {})
    card = Card("llama", (replace(line, check="numbers"), line))
    assert with_training_step(card, LLAMA, NotRun("needs a GPU")) == card
    never = Card("llama", (replace(line, passed=None),))
    assert with_training_step(never, LLAMA, NotRun("no")).lines[0].values == {"not_run": "no"}


def test_the_command_says_whether_peers_were_compiled(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    line = Line("training_step", None, {}, "command", "2026-01-02", "GPU", {})

    def command(*providers):
        found = True, {"providers": {name: {} for name in providers}}
        return with_training_step(Card("llama", (line,)), LLAMA, found).lines[0].command

    assert command("ours", "transformers+sdpa") == "liger-models card llama --only training_step"
    assert command("ours", "transformers+sdpa+compile").endswith(" --only training_step --compiled")


def test_checks_that_are_left_out_stay_as_they_were(repository, monkeypatch, without_a_gpu):
    pytest.importorskip("transformers")
    failing(monkeypatch)
    arguments = ["card", "llama", "--repository", str(repository)]
    assert main([*arguments, "--only", "training_step"]) == 0
    path = repository / "docs/families/llama.json"
    assert {line.check: line.values.get("not_run") for line in Card.read(path).lines} == {
        **dict.fromkeys(CHECKS, "not requested"),
        "training_step": "needs a GPU",
    }
    main([*arguments, "--only", "numbers", "--only", "resume"])
    ran = [line.check for line in Card.read(path).lines if line.passed]
    assert ran == ["numbers", "resume"]
    main([*arguments, "--only", "reload"])
    assert [line.check for line in Card.read(path).lines if line.passed] == [*ran, "reload"]


# -- each check can fail


def test_changed_bytes_are_found(shop, monkeypatch):
    assert checks.round_trip(shop)[0]
    monkeypatch.setattr(checks, "_files", lambda folder: {"model.safetensors": folder.name.encode()})
    passed, found = checks.round_trip(shop)
    assert not passed
    assert "changed: model.safetensors" in CHECKS["round_trip"].say(found)


def test_wrong_numbers_text_and_weights_are_found(shop, monkeypatch):
    for name in ("numbers", "generation", "resume", "reload"):
        assert CHECKS[name].run(shop)[0], name
    from_hub = liger_models.from_hub

    def off(folder, **options):
        model = from_hub(folder, **options)
        with torch.no_grad():
            model.layers[1].mlp.down_proj.weight.mul_(1.5)
        return model

    for module in (liger_models, verification):
        monkeypatch.setattr(module, "from_hub", off)
    for name in ("numbers", "generation", "reload"):
        passed, found = CHECKS[name].run(shop)
        assert not passed, name
        assert CHECKS[name].say(found)
    changed = next(shop.resumed.final.glob("*.safetensors"))
    changed.write_bytes(changed.read_bytes()[:-1] + b"\x01")
    passed, found = checks.resume(shop)
    assert not passed
    assert "different weights or losses" in CHECKS["resume"].say(found)


# -- the training step, of all families in one run


@pytest.fixture
def tiny_models(monkeypatch):
    """Take test configs as published ones, and measure short steps."""

    def published(family, repository):
        return [Published(f"{family.model_type}-1", 1, dict(family.tiny))]

    monkeypatch.setattr(training_step, "published", published)
    monkeypatch.setattr(training_step, "TOKENS", 16)
    monkeypatch.setattr(training_step, "STEPS", 1)


def test_families_are_measured_on_all_devices_by_the_benchmarks(repository, tiny_models, monkeypatch):
    """A family that fails gets a note on its card, and the others continue."""
    (repository / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.setattr(training_step, "settings_of_peers", lambda *about: [])
    monkeypatch.setattr(training_step, "TOKENS_OF_A_STEP", 32)  # two rows of 16 for this model
    monkeypatch.setattr(training_step, "TIME_LIMIT", 600.0)  # long enough for a busy machine
    plan = training_step.plan

    def break_down(family, *others):
        jobs = plan(family, *others)
        if family is not LLAMA:
            jobs[0]["config"] = jobs[0]["config"] | {"num_attention_heads": 5}
        return jobs

    monkeypatch.setattr(training_step, "plan", break_down)
    families = [find_architecture("qwen3"), LLAMA]
    outcomes = training_step.measure(families, repository, ["cpu", "cpu"])
    found = {family.model_type: outcome for family, outcome in outcomes}
    passed, values = found["llama"]
    assert passed
    assert values["layers"] == LLAMA.tiny["num_hidden_layers"]
    assert (values["batch"], values["tokens"]) == (2, 16)
    assert values["providers"]["ours"]["tokens_per_second"] > 0
    passed, values = found["qwen3"]
    assert not passed
    assert values["providers"]["ours"]["note"].startswith("failed: ConfigError: ")


def test_the_note_of_an_unmeasured_family_names_what_is_missing(repository, tiny_models, monkeypatch):
    def reasons(devices):
        return [str(found) for _, found in training_step.measure([LLAMA], repository, devices)]

    assert reasons([]) == ["needs a GPU"]
    assert reasons(["cpu"]) == ["needs a checkout with the benchmarks"]
    (repository / "benchmarks" / "training").mkdir(parents=True)
    monkeypatch.setattr(training_step, "published", lambda family, repository: [])
    monkeypatch.setattr(training_step, "_language_models", lambda model_type, repository: [])
    monkeypatch.setattr(training_step, "defaults", lambda family, repository: [])
    assert reasons(["cpu"]) == ["needs a published config of the family"]


def settings_of(family, tokens, compiled=False, **changes):
    config = HFConfig.load({**family.tiny, **changes})
    sdpa = peers.has_sdpa(family)
    return peers.settings_of_peers(family.spec(config), tokens, compiled, sdpa)


def test_a_vision_language_family_is_measured_with_images():
    jobs = training_step.plan(find_architecture("qwen2_vl"), ROOT, ["cpu"])
    assert {job["data"] for job in jobs} == {"images"}
    assert [job["provider"] for job in jobs] == [
        *("ours", "ours+graphs", "transformers+liger+sdpa", "transformers+sdpa")
    ]
    *providers, _, _ = training_step.plan(find_architecture("qwen4_exp"), ROOT, ["cpu"])
    assert not any("graphs" in job["provider"] for job in providers)  # its indexers cannot be recorded
    nested, *_ = training_step.plan(find_architecture("llava"), ROOT, ["cpu"])
    result = {"tokens_per_second": 1.0, "gib": 1.0}
    passed, values = training_step.outcome(nested, {"ours": result})
    assert passed
    assert values["layers"] == nested["config"]["text_config"]["num_hidden_layers"]
    assert "tokens with images, bfloat16" in results.say(values)


def test_older_names_of_sizes_limit_the_tokens_and_count_the_layers():
    """GPT-2 calls its layers n_layer, and has as many positions as its table."""
    ours, *_ = training_step.plan(find_architecture("gpt2"), ROOT, ["cpu"])
    assert (ours["batch"], ours["seq"]) == (4 * 8, 1024)  # a small model has more rows
    _, values = training_step.outcome(ours, {"ours": {"tokens_per_second": 1.0, "gib": 1.0}})
    assert values["layers"] == ours["config"]["n_layer"]


def test_peers_are_measured_in_each_setting_that_may_be_their_fastest():
    assert settings_of(LLAMA, 64) == ["transformers+liger+sdpa", "transformers+sdpa"]
    capped = settings_of(find_architecture("gemma2"), 64)
    assert capped[2:] == ["transformers+flex_attention", "transformers+eager"]
    mistral = find_architecture("mistral")
    assert settings_of(mistral, 64, sliding_window=65)[1:] == ["transformers+sdpa"]
    assert settings_of(mistral, 64, sliding_window=64)[2:] == [
        "transformers+sdpa",
        "transformers+flex_attention",
    ]
    assert settings_of(find_architecture("gptj"), 64)[1:] == ["transformers+eager"]  # has no SDPA there
    experts = settings_of(find_architecture("qwen3_moe"), 64, use_sliding_window=False)
    assert experts == [
        "transformers+liger+sdpa+grouped_mm",
        "transformers+sdpa+grouped_mm",
        "transformers+liger+sdpa",
    ]


def test_recurrent_peers_use_the_packages_that_are_installed(monkeypatch):
    installed = {"fla": True, "causal_conv1d": None, "mamba_ssm": True}
    monkeypatch.setattr(peers.importlib.util, "find_spec", installed.get)
    monkeypatch.setattr(peers, "has_sdpa", lambda family: True)  # transformers' imports look, too
    assert settings_of(find_architecture("qwen3_5_text"), 64)[1:] == ["transformers+sdpa+fla"]
    assert settings_of(find_architecture("bamba"), 64)[1:] == ["transformers+sdpa+mamba_ssm"]
    assert settings_of(find_architecture("mamba"), 64)[1:] == ["transformers+sdpa+mamba_ssm"]
    assert settings_of(LLAMA, 64)[1:] == ["transformers+sdpa"]
    installed["causal_conv1d"] = True
    lfm2 = find_architecture("lfm2")
    assert settings_of(lfm2, 64, conv_L_cache=4)[1:] == ["transformers+sdpa+causal_conv1d"]
    assert settings_of(lfm2, 64, conv_L_cache=5)[1:] == ["transformers+sdpa"]  # wider than its kernels


def test_peers_are_compiled_in_the_settings_that_may_be_their_fastest():
    capped = settings_of(find_architecture("gemma2"), 64, compiled=True)
    assert capped[4:] == ["transformers+liger+flex_attention+compile", "transformers+flex_attention+compile"]
    experts = settings_of(find_architecture("qwen3_moe"), 64, compiled=True, use_sliding_window=False)
    assert experts[3:] == [
        "transformers+liger+sdpa+grouped_mm+compile",
        "transformers+sdpa+grouped_mm+compile",
    ]


def test_a_training_step_is_compared_with_each_peers_fastest_setting():
    def result(speed, gib):
        return {"tokens_per_second": speed, "gib": gib}

    found = {"model": "tiny", "layers": 2, "batch": 2, "tokens": 64, "own_processes": True}
    found["providers"] = {
        "ours": result(3000.0, 5.0),
        "transformers+liger+sdpa": {"note": "out of memory"},
        "transformers+sdpa+grouped_mm": result(1000.0, 8.0),
        "transformers+sdpa+loop": result(2000.0, 10.0),
    }
    assert results.say(found) == (
        "tiny, 2 layers, 2 x 64 tokens, bfloat16, fused AdamW: 1.50 x the speed, 0.50 x the memory of the "
        "fastest peer. ours: 3,000 tokens/s, 5.0 GiB; transformers+liger: out of memory; transformers (sdpa, "
        "loop): 2,000 tokens/s, 10.0 GiB; transformers (sdpa, grouped_mm): 1,000 tokens/s, 8.0 GiB"
    )
    alone = {**found, "providers": {"ours": result(3000.0, None)}}
    assert results.say(alone).endswith("no peer ran. ours: 3,000 tokens/s")
    recorded = {"ours": result(2500.0, 4.0), "ours+graphs": result(4000.0, 5.0)}
    assert (
        ": 2.00 x the speed, 0.50 x the memory of the fastest peer. ours (graphs): 4,000 tokens/s, 5.0 GiB; "
        in (results.say({**found, "providers": {**found["providers"], **recorded}}))
    )
    slower = {**found, "providers": {**found["providers"], "ours": result(1000.0, None)}}
    assert results.format_against_peers(slower) == "0.50 x the speed"
    shared = {name: value for name, value in slower.items() if name != "own_processes"}
    assert results.format_against_peers(shared) == "0.50 x the speed" + results.SHARED


def test_as_many_layers_are_kept_as_fit_and_at_least_one_of_each_kind():
    config = {**LLAMA.tiny, "num_hidden_layers": 8}
    assert training_step.layers_that_fit(config, 1 << 40) == (8, True)
    assert training_step.layers_that_fit(config, 1) == (1, False)
    model = liger_models.from_config(config, device="meta")
    layer = sum(weight.numel() for weight in model.layers[0].parameters())
    logits = training_step.TOKENS_OF_A_STEP * 131
    others = training_step.BYTES_OF_A_LOGIT * logits + 8 * (model.num_parameters() - 8 * layer)
    share = training_step.SHARE
    assert training_step.layers_that_fit(config, round((others + 8 * 5 * layer) / share) + 1)[0] == 5
    assert training_step.layers_that_fit(config, round((others + 8 * 5 * layer) / share) - 8)[0] == 4
    deepseek = find_architecture("deepseek_v3").tiny
    assert training_step.layers_that_fit(deepseek, 1)[0] == deepseek["first_k_dense_replace"] + 1


def test_tables_of_embeddings_take_no_operations_unless_they_are_the_head():
    """Gemma 3n's tables by layer are half of its parameters, and its step is short enough for CUDA graphs."""
    for tied in (True, False):
        config = {**LLAMA.tiny, "tie_word_embeddings": tied}
        model = liger_models.from_config(config, device="meta")
        products = sum(p.numel() for p in model.layers.parameters()) + model.norm.weight.numel()
        products += model.embed_tokens.weight.numel()  # the size of the head, too
        assert training_step.operations(config, 10) == 6 * 10 * products


def test_experts_are_halved_while_one_layer_of_each_kind_does_not_fit():
    config = {**find_architecture("deepseek_v3").tiny, "n_routed_experts": 256, "num_experts_per_tok": 8}
    assert training_step.cut(config, 1 << 40) == config
    assert training_step.cut(config, 1)["n_routed_experts"] == 16  # twice as many as a token chooses


def test_layers_that_differ_in_a_cap_alone_are_of_one_kind():
    """Otherwise the caps of Step 3.7's last layers would ask for all 45."""
    (step,) = published(find_architecture("step3p7"), ROOT)
    assert layers_of_every_kind(step.config) > 40
    assert layers_of_every_kind(step.config, numbers=False) == 5


def test_a_family_without_a_known_model_takes_a_language_model_of_its_kind():
    compass = training_step._language_models("cohere_compass_text", ROOT)
    assert [model.name for model in compass] == ["language model of North-Micro-Vision-Instruct"]
    assert compass[0].config["model_type"] == "cohere_compass_text"
    config = {"text_config": {"model_type": "cohere_compass_text", "vocab_size": 90}, "image_token_id": 3}
    tiny = {"image_token_id": 1, "video_token_id": 2, "newline_id": 3, "insert_layer_id": None}
    (_, plain), (_, named), (name, other) = training_step._tries("x", config, tiny, ROOT)
    assert plain == config
    assert named == {**config, "video_token_id": 89, "newline_id": 88}
    assert name == "x with the language model of North-Micro-Vision-Instruct"
    assert other == {**named, "text_config": compass[0].config}


def test_per_layer_lists_are_truncated_with_the_layers():
    config = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "ids": [1, 2]}
    assert with_layers(config, 2) == {"num_hidden_layers": 2, "layer_types": ["a", "b"], "ids": [1, 2]}
    counted = {"num_heads": 2, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}  # from 1
    cut = with_layers({"num_hidden_layers": 4, "linear_attn_config": counted}, 3)
    assert cut["linear_attn_config"] == {**counted, "full_attn_layers": []}


# -- the pages


def test_the_pages_match_the_registry_and_the_cards():
    made = pages.make_pages(ROOT).items()
    stale = [path.name for path, text in made if not path.is_file() or path.read_text() != text]
    assert stale == [], "generate them again with: liger-models card"


@pytest.mark.parametrize("name", ["gemma4_text", "falcon_h1", "deepseek_v3"])
def test_the_pictures_match_the_registry(name):
    made = picture_of_family(find_architecture(name), ROOT)
    assert made == (ROOT / pages.CARDS / f"{name}.svg").read_text(), "draw it again with: liger-models card"
    ElementTree.fromstring(made)


def test_layers_that_look_the_same_are_drawn_once():
    """Gemma 2's layers alternate between two kinds; each has a norm before and after its branches."""
    spec = find_architecture("gemma2").spec(HFConfig.load(dict(find_architecture("gemma2").tiny)))
    first, second = (look(block) for block in spec.blocks[:2])
    assert first != second
    assert [[box[0][0] for box in branch] for branch in first] == [
        ["norm", "mixer", "norm"],
        ["norm", "mlp", "norm"],
    ]
    drawn = " ".join(layers(spec)[0])
    assert drawn.count("RMSNorm</text>") == 8
    assert "window" in drawn


def test_every_topology_can_be_drawn():
    assert set(BRANCHES) == set(BLOCKS)


def test_every_card_belongs_to_a_registered_family_is_complete_and_passed():
    files = {path for path in (ROOT / pages.CARDS).iterdir() if path.name != "README.md"}
    families = {path.stem for path in files}
    assert families <= {*list_architectures(), *list_architectures(vision=True, audio=True)}
    assert files == {
        ROOT / pages.CARDS / f"{name}.{kind}" for name in families for kind in ("json", "md", "svg")
    }
    for name in families:
        card = Card.read(ROOT / pages.CARDS / f"{name}.json")
        assert card.family == name
        assert [line.check for line in card.lines] == list(CHECKS)
        assert card.passed, name


def features_of(family):
    architecture = find_architecture(family)
    return set(features(architecture.spec(HFConfig.load(dict(architecture.tiny)))))


def test_features_are_derived_from_the_spec():
    capped = {"attention soft-capping", "logit soft-capping"}
    assert features_of("gemma2") >= {"sliding window on some layers", "tied embeddings"} | capped
    assert features_of("deepseek_v3") >= {"latent attention", "experts", "shared experts"}
    assert features_of("qwen3_moe") >= {"QK-norm", "experts", "grouped-query attention"}
    assert features_of("cohere") >= {"LayerNorm", "parallel attention and MLP", "interleaved rotary"}
    hybrid = features_of("qwen3_5_text")
    assert "gated delta rule" in hybrid
    assert "layers without positions (NoPE)" not in hybrid  # of layers with attention
    assert not features_of("mistral") & {"experts", "QK-norm", "latent attention", "attention soft-capping"}


def test_known_sizes_match_the_published_configs():
    names = [model.name for model in published(LLAMA, ROOT)]
    assert names[0] == "TinyLlama-1.1B-Chat-v1.0"
    assert "Llama-3.2-1B (1.24 B)" in pages.sizes(LLAMA, ROOT)
