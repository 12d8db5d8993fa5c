"""Cards: a family is checked from its registration alone, and the pages are what their data say."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture, list_architectures
from liger_models.cards import checks, pages, training_step
from liger_models.cards.card import Card, make_card
from liger_models.cards.checks import CHECKS
from liger_models.cards.published import FOLDER, features, published, with_layers
from liger_models.cards.workshop import Workshop
from liger_models.cli import main
from liger_models.convert.config.hf_config import HFConfig

ROOT = Path(__file__).parents[2]
LLAMA = find_architecture("llama")


@pytest.fixture
def repository(tmp_path):
    """A folder with the README of a checkout."""
    (tmp_path / "README.md").write_text(f"# Models\n\n{pages.BEGIN}\n{pages.END}\n\nMore.\n")
    return tmp_path


@pytest.fixture
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    pytest.importorskip("transformers")
    return Workshop(LLAMA, tmp_path_factory.mktemp("shop"), ROOT)


# -- making one


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
    assert "[`llama`](docs/families/llama.md) |" in (repository / "README.md").read_text()
    assert "5 of 5 passed" in (repository / "docs/families/README.md").read_text()
    assert "llama: greedy generation beside transformers: passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "is not a checkout of liger_models; name one with --repository"),
        (["lama"], "the model type 'lama' is not supported. The nearest: llama"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments, message, repository, capsys):
    folder = repository if arguments else repository / "elsewhere"
    assert main(["card", *arguments, "--repository", str(folder)]) == 2
    assert message in capsys.readouterr().err
    assert not (repository / "docs").exists()


def failing(monkeypatch, **runs):
    """Every check gives nothing, but for those in `runs`."""
    fakes = {
        name: replace(check, run=runs.get(name, lambda shop: (True, {})), say=lambda found: "nothing")
        for name, check in CHECKS.items()
    }
    for module in (checks, pages):
        monkeypatch.setattr(module, "CHECKS", fakes)
    monkeypatch.setattr("liger_models.cards.card.CHECKS", fakes)


def test_a_check_that_breaks_down_fails_and_the_others_go_on(repository, monkeypatch, capsys):
    pytest.importorskip("transformers")

    def broken(shop):
        raise ValueError("no such layer\nand more")

    failing(monkeypatch, numbers=broken)
    assert main(["card", "llama", "--repository", str(repository)]) == 1
    card = Card.read(repository / "docs/families/llama.json")
    failed = [line for line in card.lines if not line.passed]
    assert [(line.check, line.values) for line in failed] == [
        ("numbers", {"error": "ValueError: no such layer"})
    ]
    assert "**failed** | ValueError: no such layer |" in (repository / "docs/families/llama.md").read_text()


def test_what_this_machine_cannot_run_stays_with_its_date_and_machine(monkeypatch, without_a_gpu):
    pytest.importorskip("transformers")
    failing(monkeypatch, training_step=training_step.run)
    fresh = make_card(LLAMA, ROOT)
    assert fresh.lines[-1].values == {"not_run": "needs a GPU"}
    measured = replace(fresh.lines[-1], passed=True, values={"model": "x"}, date="2026-01-02", machine="GPU")
    card = make_card(LLAMA, ROOT, earlier=replace(fresh, lines=(*fresh.lines[:-1], measured)))
    assert card.lines[-1] == measured
    assert card.lines[0].date != "2026-01-02"


# -- each check can fail


def test_bytes_that_change_are_found(shop, monkeypatch):
    assert checks.round_trip(shop)[0]
    monkeypatch.setattr(checks, "_files", lambda folder: {"model.safetensors": folder.name.encode()})
    passed, found = checks.round_trip(shop)
    assert not passed
    assert "changed: model.safetensors" in CHECKS["round_trip"].say(found)


def test_other_numbers_text_and_weights_are_found(shop, monkeypatch):
    for name in ("numbers", "generation", "resume", "reload"):
        assert CHECKS[name].run(shop)[0], name
    from_hub = liger_models.from_hub

    def off(folder, **options):
        model = from_hub(folder, **options)
        with torch.no_grad():
            model.layers[1].mlp.down_proj.weight.mul_(1.5)
        return model

    monkeypatch.setattr(liger_models, "from_hub", off)
    for name in ("numbers", "generation", "reload"):
        passed, found = CHECKS[name].run(shop)
        assert not passed, name
        assert CHECKS[name].say(found)
    changed = next(shop.resumed.final.glob("*.safetensors"))
    changed.write_bytes(changed.read_bytes()[:-1] + b"\x01")
    passed, found = checks.resume(shop)
    assert not passed
    assert "other weights or losses" in CHECKS["resume"].say(found)


def test_a_training_step_is_measured_by_the_benchmarks(shop, tmp_path, monkeypatch):
    """The command that is run and told is one that they understand, and what they write is understood."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.report import publish
    from benchmarks.train import _config, add_arguments

    name = published(LLAMA, ROOT)[0].name

    def run(command, cwd, **options):
        monkeypatch.chdir(cwd)
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        parser.add_argument("--out")
        assert command[1:4] == ["-m", "benchmarks", "train"]
        args = parser.parse_args(command[4:])
        config = _config({"model": args.model, "layers": args.layers})
        assert (config["num_hidden_layers"], config["model_type"]) == (2, "llama")
        providers = [configuration.split(":")[0] for configuration in args.configuration]
        result = {"tokens_per_second": 1234.5, "peak_gib": 5.25, "seq": args.seq}
        rows = [{"provider": provider, "note": "", **result} for provider in providers[:-1]]
        publish(args.out, "x", "", [*rows, {"provider": providers[-1], "note": "out of memory"}])

    monkeypatch.setattr("subprocess.run", run)
    passed, found = training_step.measure(shop, FOLDER / f"{name}.json", 2, ["--seq", "64"])
    assert passed
    assert training_step.say(found) == (
        f"{name}, 2 layers, 2 x 64 tokens, bfloat16, fused AdamW: ours: 1,234 tokens/s, 5.2 GiB; "
        "transformers+liger: 1,234 tokens/s, 5.2 GiB; transformers: out of memory"
    )


def test_as_many_layers_are_taken_as_fit():
    config = {**LLAMA.tiny, "num_hidden_layers": 8}
    assert training_step.layers_that_fit(config, 1 << 40) == 8
    assert training_step.layers_that_fit(config, 1) == 1
    bytes_of_logits = training_step.BYTES_OF_A_LOGIT * training_step.BATCH * training_step.TOKENS * 131
    fewer = training_step.layers_that_fit(config, 2 * bytes_of_logits + 2 * 8 * 4 * 25_000)
    assert 1 < fewer < 8


def test_what_is_listed_by_layer_is_cut_with_the_layers():
    config = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "ids": [1, 2]}
    assert with_layers(config, 2) == {"num_hidden_layers": 2, "layer_types": ["a", "b"], "ids": [1, 2]}


# -- the pages


def test_the_pages_are_what_the_registry_and_the_cards_say():
    made = pages.make_pages(ROOT).items()
    stale = [path.name for path, text in made if not path.is_file() or path.read_text() != text]
    assert stale == [], "make them anew with: liger-models card"


def test_every_card_belongs_to_a_registered_family_has_every_line_and_passed():
    files = {path for path in (ROOT / pages.CARDS).iterdir() if path.name != "README.md"}
    families = {path.stem for path in files}
    assert families <= set(list_architectures())
    assert files == {ROOT / pages.CARDS / f"{name}.{kind}" for name in families for kind in ("json", "md")}
    for name in families:
        card = Card.read(ROOT / pages.CARDS / f"{name}.json")
        assert card.family == name
        assert [line.check for line in card.lines] == list(CHECKS)
        assert card.passed, name


def features_of(family):
    architecture = find_architecture(family)
    return set(features(architecture.spec(HFConfig.load(dict(architecture.tiny)))))


def test_features_are_read_off_the_spec():
    assert features_of("gemma2") >= {"windows on some layers", "capped scores", "capped logits", "tied head"}
    assert features_of("deepseek_v3") >= {"latent attention", "experts", "shared experts"}
    assert features_of("qwen3_moe") >= {"q/k norms", "experts", "grouped heads"}
    assert features_of("cohere") >= {"LayerNorm", "parallel branches", "neighbours turned"}
    assert not features_of("mistral") & {"experts", "q/k norms", "latent attention", "capped scores"}


def test_known_sizes_are_those_of_the_published_configs():
    names = [model.name for model in published(LLAMA, ROOT)]
    assert names[0] == "TinyLlama-1.1B-Chat-v1.0"
    assert "Llama-3.2-1B (1.24 B)" in pages.sizes(LLAMA, ROOT)
