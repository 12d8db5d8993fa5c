"""Every command of `liger-models`, called as the installed script calls it."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import liger_models
from liger_models.architectures import find_architecture
from liger_models.cli import inspect, main
from liger_models.cli.shared.checkpoints import find_checkpoint
from liger_models.convert.checkpoints import hub
from liger_models.convert.checkpoints.expressions import Cat
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.reading import CheckpointReader
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.presets import PRESETS

TEXT = "the quick brown fox jumps over the lazy dog; el pingüino come sushi 寿司"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def write_checkpoint(folder, family, tokenizer_folder, **changes):
    """Write a tiny float32 checkpoint of a family with random parameters."""
    vocab_size = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).get_vocab_size()
    config = {**find_architecture(family).tiny, "vocab_size": vocab_size, **changes}
    model = liger_models.from_config(config, dtype="float32")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    for file in tokenizer_folder.iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tokenizer_folder, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama", tokenizer_folder)


def tensors(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            found |= {name: file.get_tensor(name) for name in names}
    return found


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- list and init


def test_list_names_every_architecture_and_preset(capsys):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in [*liger_models.list_architectures(), *PRESETS]:
        assert f"  {name} " in shown


def test_init_writes_a_checkpoint_with_the_tokenizers_vocabulary(tokenizer_folder, tmp_path):
    out = tmp_path / "new"
    assert main(["init", "llama-demo", str(out), "--tokenizer", str(tokenizer_folder)]) == 0
    model = liger_models.from_hub(out)
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == 280
    assert (model.config.bos_token_id, model.config.eos_token_id) == (0, 1)
    assert (out / "tokenizer.json").read_bytes() == (tokenizer_folder / "tokenizer.json").read_bytes()
    # Normal with the preset's standard deviation of 0.02, whose estimate from n values is off by 0.02 /
    # sqrt(2n).
    weights = model.layers[0].mlp.down_proj.weight.float()
    assert weights.std().item() == pytest.approx(0.02, abs=5 * 0.02 / (2 * weights.numel()) ** 0.5)


def test_init_gives_the_same_weights_for_the_same_seed_only(tmp_path):
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert main(["init", "llama-demo", str(tmp_path / name), "--seed", seed, "--dtype", "float16"]) == 0
    a, b, c = (files(tmp_path / name) for name in "abc")
    assert a == b
    assert a["config.json"] == c["config.json"]
    assert a["model.safetensors"] != c["model.safetensors"]


def test_init_does_not_overwrite(checkpoint, capsys):
    before = files(checkpoint)
    assert main(["init", "llama-demo", str(checkpoint)]) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert files(checkpoint) == before


# -- inspect


def test_inspect_names_every_checkpoint_tensor_once_and_reads_no_weights(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(CheckpointReader, "read_into", None)
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    sources = [source for row in report["parameters"] for source in row["from"].items()]
    expected = {name: list(tensor.shape) for name, tensor in tensors(checkpoint).items()}
    assert len(sources) == len(expected)
    assert dict(sources) == expected
    count = sum(tensor.numel() for tensor in tensors(checkpoint).values())
    assert report["num_parameters"] == count
    # float32 weights, their gradients, and two moments
    memory = report["memory"]
    assert (memory["weights"], memory["gradients"], memory["adamw"]) == (4 * count, 4 * count, 8 * count)


def test_inspect_prints_a_part_without_settings():
    """As the pictures of Pixtral's encoder."""
    assert inspect._spec_lines({"size": 3, "pictures": {}}) == ["size 3", "pictures: as by default"]


def test_inspect_of_a_repository_reads_its_headers_from_the_hub(checkpoint, capsys, monkeypatch):
    def uncached(name, **options):
        assert options == {"local_files_only": True}
        raise liger_models.HubError("not in the cache")

    raw = json.loads((checkpoint / "config.json").read_text())
    headers = {name: ("float16", tuple(x.shape)) for name, x in tensors(checkpoint).items()}
    monkeypatch.setattr(hub, "resolve", uncached)
    monkeypatch.setattr(hub, "read_headers", lambda name: {"org/model": (raw, headers)}[name])
    assert main(["inspect", "org/model", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["dtype"] for row in report["parameters"]} == {"float16"}
    assert report["memory"]["weights"] == 2 * report["num_parameters"]


def test_a_misspelled_preset_is_reported_with_the_nearest(capsys, monkeypatch):
    def unreachable(name, **options):
        raise liger_models.HubError("no network")

    monkeypatch.setattr(hub, "resolve", unreachable)
    monkeypatch.setattr(hub, "read_headers", unreachable)
    assert main(["inspect", "llama3.1-8b"]) == 2
    assert "no network; the nearest preset is llama-3.1-8b" in capsys.readouterr().err


def test_inspect_groups_equal_layers_and_shows_where_parameters_come_from(checkpoint, capsys):
    assert main(["inspect", str(checkpoint)]) == 0
    shown = capsys.readouterr().out
    assert "layers 0 to 2\n" in shown
    (row,) = [line for line in shown.splitlines() if "mlp.gate_up_proj.weight" in line]
    assert row.split() == [
        *["layers.{0..2}.mlp.gate_up_proj.weight", "[160,", "48]", "float32", "="],
        *["cat(model.layers.{i}.mlp.gate_proj.weight,", "model.layers.{i}.mlp.up_proj.weight)"],
    ]


def test_inspect_says_which_layers_would_run_in_float8(capsys):
    assert main(["inspect", "llama-3.2-1b", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    chosen, others = report["float8"]["layers"], report["float8"]["others"]
    assert "layers.0.mlp.gate_up_proj" in chosen
    assert not others
    plain = report["memory"]["activations_per_token"]["lean"]
    gate_up = 16 * 2 * 8192  # of 16 layers
    assert report["float8"]["lean_per_token"] == plain - gate_up + gate_up // 64 * 2  # a scale for 64
    assert main(["inspect", "llama-3.2-1b"]) == 0
    assert f"With --float8: {len(chosen)} linear layers" in capsys.readouterr().out


def test_inspect_lists_different_layers_separately():
    layers = [{"window": 8}, {"window": 8}, {"window": None}, {"window": 8}]
    assert inspect._runs(layers) == [((0, 1), layers[0]), ((2, 2), layers[2]), ((3, 3), layers[3])]


def test_inspect_sums_the_activations_of_the_layers(checkpoint, capsys):
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["memory"]["activations_per_token"]
    layers = liger_models.from_config(checkpoint, device="meta").layers
    assert found == {level: sum(layer.activation_bytes(level, 4) for layer in layers) for level in LEVELS}


# -- verify


def test_verify_accepts_a_sound_checkpoint(checkpoint, capsys):
    assert main(["verify", str(checkpoint)]) == 0
    shown = capsys.readouterr().out
    assert "every byte the same" in shown
    compared = len(tensors(checkpoint)) + 2  # a gradient for each, logits and loss
    assert f"{compared} compared, 0 too far apart\n" in shown
    assert "not compared" not in shown


def test_verify_finds_bytes_that_change_in_the_round_trip(checkpoint, capsys, monkeypatch):
    """Key and value are swapped on saving: equal shapes, different bytes."""
    write = Cat.write

    def exchanged(self, tensor):
        out = write(self, tensor)
        if len(out) == 3:
            _, k, v = out
            out[k], out[v] = out[v], out[k]
        return out

    monkeypatch.setattr(Cat, "write", exchanged)
    assert main(["verify", str(checkpoint), "--no-transformers"]) == 1
    assert "CHANGED: model.layers.0.self_attn.k_proj" in capsys.readouterr().out


def test_verify_finds_a_wrong_weight_map_that_bytes_cannot_show(checkpoint, capsys, monkeypatch):
    """Gate and up are swapped on loading and saving: the round trip is exact, but the model is wrong."""
    weight_map = Layout.weight_map

    def exchanged(self, forms):
        found = weight_map(self, forms)
        return {
            name: Cat(expr.parts[::-1]) if "gate_up_proj" in name else expr for name, expr in found.items()
        }

    monkeypatch.setattr(Layout, "weight_map", exchanged)
    assert main(["verify", str(checkpoint), "--transformers"]) == 1
    shown = capsys.readouterr().out
    assert "every byte the same" in shown
    assert "too far apart: " in shown


def test_verify_skips_a_missing_transformers_unless_requested(checkpoint, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["verify", str(checkpoint)]) == 0
    assert "not compared with transformers: it is not installed" in capsys.readouterr().out
    assert main(["verify", str(checkpoint), "--transformers"]) == 2
    assert "pip install" in capsys.readouterr().err


# -- export


def test_export_repeats_an_untrained_checkpoint_byte_for_byte(checkpoint, tmp_path):
    (tmp_path / ".out.tmp-0123456789ab").mkdir()  # left by an export that was killed
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    assert files(tmp_path / "out") == files(checkpoint)
    assert os.listdir(tmp_path) == ["out"]


def test_export_changes_dtype_and_shards_on_request(checkpoint, tmp_path):
    out = tmp_path / "out"
    options = ["--dtype", "bfloat16", "--max-shard-size", "50kB"]
    assert main(["export", str(checkpoint), str(out), *options]) == 0
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    found, expected = tensors(out), tensors(checkpoint)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in found)


def test_export_refuses_its_own_source(checkpoint, capsys):
    before = files(checkpoint)
    assert main(["export", str(checkpoint), str(checkpoint / "."), "--dtype", "bfloat16"]) == 2
    assert "choose another output folder" in capsys.readouterr().err
    assert main(["export", str(checkpoint), str(checkpoint.parent)]) == 2  # a run's folder, say
    assert "holds the source" in capsys.readouterr().err
    assert files(checkpoint) == before


def test_the_folder_of_a_training_run_means_its_latest_checkpoint(checkpoint, tmp_path):
    def written(name, seconds):
        shutil.copytree(checkpoint, tmp_path / name)
        (tmp_path / name / "training_state").mkdir()
        (tmp_path / name / "training_state" / "state.json").write_text("{}")
        os.utime(tmp_path / name / "config.json", (seconds, seconds))
        return tmp_path / name

    written("checkpoint-9", 1000)
    tenth = written("checkpoint-10", 1001)
    assert find_checkpoint(str(tmp_path)) == tenth
    final = written("final", 1002)
    assert find_checkpoint(str(tmp_path)) == final
    resumed = written("checkpoint-12", 1003)
    assert find_checkpoint(str(tmp_path)) == resumed
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 0
    assert tensors(tmp_path / "out").keys() == tensors(checkpoint).keys()


# -- generate


def test_generate_prints_the_models_continuation(checkpoint, capsys):
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = tokenizer.encode("the lazy").ids
    new = liger_models.from_hub(checkpoint).generate(torch.tensor([ids]), 30)[0, len(ids) :].tolist()
    stream = decoders.DecodeStream(ids=ids, skip_special_tokens=True)
    expected = "".join(stream.step(tokenizer, token) or "" for token in new)
    assert len(expected) > 5
    assert main(["generate", str(checkpoint), "--prompt", "the lazy", "--max-new-tokens", "30"]) == 0
    assert capsys.readouterr().out == f"the lazy{expected}\n"


def test_generate_prompts_a_chat_model_through_its_template(checkpoint, tmp_path, capsys, monkeypatch):
    given = []

    def note(self, ids, *_, **options):
        given.append(ids[0].tolist())

    shutil.copytree(checkpoint, tmp_path / "model")
    template = (
        "<s>{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    monkeypatch.setattr(LigerCausalLM, "generate", note)
    assert main(["generate", str(tmp_path / "model"), "--prompt", "fox"]) == 0
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert given == [tokenizer.encode("<s>[fox]>", add_special_tokens=False).ids]
    assert capsys.readouterr().out == "fox\n\n"


def test_chat_remembers_the_conversation(checkpoint, tmp_path, capsys, monkeypatch):
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    asked = []

    def answer(self, ids, on_token, **options):
        asked.append(tokenizer.decode(ids[0].tolist()))
        for token in tokenizer.encode("fine, stop here", add_special_tokens=False).ids:
            if on_token(torch.tensor([token])) is not None:
                break

    monkeypatch.setattr(LigerCausalLM, "generate", answer)
    lines = iter(["fox", "dog", "/reset", "cat", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main(["chat", str(tmp_path / "model"), "--system", "be", "--stop", " stop"]) == 0
    first = "[system:be][user:fox]>"
    second = "[system:be][user:fox][assistant:fine,][user:dog]>"
    assert asked == [first, second, "[system:be][user:cat]>"]
    assert capsys.readouterr().out == "fine,\n" * 3  # printed up to the stop string, which spans tokens


def test_generate_repeats_itself_for_the_same_seed_only(checkpoint, capsys):
    shown = []
    for seed in ("1", "1", "2"):
        options = ["--prompt", "fox", "--max-new-tokens", "12", "--temperature", "2", "--seed", seed]
        assert main(["generate", str(checkpoint), *options]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]


def test_generate_shows_whole_characters_and_no_special_tokens(checkpoint, capsys, monkeypatch):
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokens = tokenizer.encode(" pingüino 司寿").ids
    assert len(tokens) > 8  # characters are split over tokens

    def speak(self, ids, *args, on_token, **options):
        for token in [*tokens, 1]:
            on_token(torch.tensor([token]))

    monkeypatch.setattr(LigerCausalLM, "generate", speak)
    assert main(["generate", str(checkpoint), "--prompt", "el"]) == 0
    assert capsys.readouterr().out == "el pingüino 司寿\n"


@pytest.mark.parametrize(("named", "ends"), [(None, [1]), (7, [1, 7]), ([7, 9], [1, 7, 9])])
def test_generate_stops_at_the_models_end_tokens_and_at_the_end_of_documents(
    checkpoint, tmp_path, monkeypatch, named, ends
):
    """The end of a turn often differs from the end of a document, and the tokenizer names only the latter."""
    given = []

    def note(*_, eos_token_id, **options):
        given.append(eos_token_id)

    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    monkeypatch.setattr(LigerCausalLM, "generate", note)
    assert main(["generate", str(tmp_path / "model"), "--prompt", "el"]) == 0
    assert given == [ends]


# -- errors


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["init", "llama-dema", "out"], "llama-demo"),
        (["inspect", "./no/such/folder"], "no/such/folder"),
        (["verify", "./no/such/folder"], "no/such/folder"),
        (["export", "./no/such/folder", "out"], "no/such/folder"),
        (["generate", "./no/such/folder", "--prompt", "x"], "no/such/folder"),
    ],
)
def test_errors_are_one_line_and_exit_code_two(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"liger-models {argv[0]}: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "output", "message"),
    [
        (
            "llama-dema",
            "run",
            r"cannot download llama-dema \(there is no folder of this name\).*preset is llama-demo",
        ),
        ("llama-demo", "", "is the folder of a model; choose another --output"),
    ],
)
def test_train_reports_unusable_names(model, output, message, checkpoint, capsys, tmp_path, monkeypatch):
    def refuse(*names, **options):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    folder = str(tmp_path / output) if output else str(checkpoint)
    assert main(["train", model, "--data", "x", "--output", folder, "--steps", "1"]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "nonsense"], "device 'nonsense' cannot be used"),
        (["--device", "cuda:99"], "device 'cuda:99' cannot be used"),
        (["--prompt", "\udcff"], "the prompt is not valid text"),
    ],
)
def test_generate_reports_unusable_arguments(options, message, checkpoint, capsys):
    assert main(["generate", str(checkpoint), "--prompt", "x", *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"liger-models generate: {message}")


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(liger_models.LigerModelsError):
        main(["inspect", str(tmp_path / "nothing"), "--debug"])


@pytest.mark.parametrize(
    "options",
    [
        ["--top-p", "0"],
        ["--temperature", "-1"],
        ["--max-new-tokens", "0"],
        ["--dtype", "int8"],
        ["--seed", str(2**63)],
    ],
)
def test_options_outside_their_range_are_refused_with_the_usage(options, checkpoint, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(checkpoint), "--prompt", "x", *options])
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_an_interrupt_exits_with_code_130(checkpoint, capsys, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(LigerCausalLM, "generate", interrupted)
    assert main(["generate", str(checkpoint), "--prompt", "x"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_closed_pipe_is_not_an_error():
    command = [sys.executable, "-m", "liger_models.cli", "list"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
