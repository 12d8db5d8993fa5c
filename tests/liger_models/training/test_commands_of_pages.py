"""Every command in README.md, CONTRIBUTING.md and docs/ runs as printed, with a tiny model. NOT_RUN has the
others, with the reason.

Models of the hub become a folder with a tiny model, and its data sets a few rows. Runs take one step. Nothing
else is changed. A command that occurs several times runs once.
"""

import builtins
import io
import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import liger_models
from liger_models.cli import main
from liger_models.training.data.reading import tables

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:\S*/)?(liger-models|python|pip|make|torchrun|oumi|git|docker|npm) "
)

NOT_RUN = {
    r"pip install .*": "needs a network: `make package` installs the wheel in a clean environment",
    r"make .*": "runs for minutes; its target exists: tests/test_pages_of_code.py",
    r"\S*python -m pytest .*": "runs tests",
    r"python tests/.*": "runs for minutes: started by hand, as CONTRIBUTING.md says",
    r"python llama.cpp/.*": "needs llama.cpp",
    r"OUMI_EXTRA_DEPS_FILE=.*": "needs oumi",
    r"torchrun --nproc-per-node 8 .*": "needs eight GPUs; its options are understood: tests/test_readme.py",
    r"torchrun .* -m torchtitan\.train .*": "needs torchtitan: tests/frameworks/test_torchtitan.py",
    r"python -m benchmarks certify .*": "runs for minutes: tests/benchmarks/test_certify.py",
    r"python -m benchmarks.*": "needs a GPU: tests/benchmarks",
    r"liger-models bench .*": "needs a GPU: tests/benchmarks/test_commands.py",
    r"liger-models card.*": "compares every family: tests/liger_models/test_cards.py",
    r"liger-models train .* --float8 .*": "needs a GPU of compute capability 8.9",
    r"liger-models (train|generate|plan) .*(Qwen2.5-VL|--image ).*": "needs images: test_images.py",
    r"liger-models .*--keep-quantised.*": "needs a quantised checkpoint: tests/liger_models/quantised",
    r"liger-models export .* --quantization .*": "needs a quantised checkpoint: tests/liger_models/quantised",
    r"liger-models train .* --cuda-graphs": "needs a GPU: tests/liger_models/training/test_step.py",
    r"liger-models train .* --weights-memory host .*": "needs a GPU: tests/liger_models/test_host_weights.py",
    r"liger-models train .* --mtp .*": "needs modules for multi-token prediction: test_mtp.py",
    r"liger-models train .* --indexer-loss .*": "needs a model with indexers: test_indexer_loss.py",
    r"liger-models train .* --log tensorboard.*": "needs tensorboard: test_observing.py",
}


def commands() -> Iterator[tuple[str, str]]:
    """(page, command) of all lines of code that start a program, each command once."""
    seen = set()
    for path in PAGES:
        text = re.sub(r" \\\n +", " ", path.read_text())
        for line in re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE):
            command = " ".join(shlex.split(line, comments=True, posix=False)) if PROGRAM.match(line) else ""
            if command and command not in seen:
                seen.add(command)
                yield path.name, command


COMMANDS = list(commands())
# What a model of two layers and data of forty rows need.
SMALLER = {"layers.3?.*": "layers.1.*", "layers.0-15": "layers.0", "1000:]": "20:]", "[:1000]": "[:20]"}


def reasons(command):
    return [reason for pattern, reason in NOT_RUN.items() if re.fullmatch(pattern, command)]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory, tiny_shape, tokenizer_folder):
    """Folder with a model, data of every kind that the pages name, a run, and a run of adapters."""
    pytest.importorskip("peft")
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("shelf")
    shutil.copytree(tokenizer_folder, folder / "folder")
    model = liger_models.from_config({**tiny_shape, "tie_word_embeddings": False}, device="cpu")
    model.save_pretrained(folder / "model")
    for file in tokenizer_folder.iterdir():
        shutil.copy(file, folder / "model")

    def jsonl(name, record):
        (folder / name).write_text((json.dumps(record) + "\n") * 40)

    turns = [{"role": "user", "content": "Tea or soup?"}, {"role": "assistant", "content": "Tea."}]
    jsonl("chats.jsonl", {"messages": turns})
    thought = {"role": "assistant", "content": "<|think|>a<|/think|>b"}
    jsonl("thoughts.jsonl", {"messages": [turns[0], thought]})
    jsonl("pairs.jsonl", {"prompt": "a b", "chosen": "c d", "rejected": "e"})
    jsonl("questions.jsonl", {"question": "a b", "answer": "c"})
    jsonl("tea.jsonl", {"prompt": "Tea or soup?", "completion": " I take tea."})
    for name in ("data.jsonl", "web.jsonl", "more.jsonl", "lines"):
        jsonl(name, {"text": "abc de fgh"})
    (folder / "questions.csv").write_text("question,answer\n" + "a b,c d\n" * 40)
    for name in ("texts/one.txt", "a.txt", "b.txt", "held-out.txt", "prompts.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("abc de fgh ij\n" * (2 if name == "prompts.txt" else 40))
    (folder / "more/deep").mkdir(parents=True)
    for name in ("more/a.parquet", "more/deep/b.parquet"):
        pq.write_table(pa.table({"text": ["abc de fgh"] * 20}), folder / name)
    (folder / "rewards.py").write_text(
        "def correct(completions, **_):\n    return [len(text) for text in completions]\n"
    )
    (settings,) = re.findall(r"^`run.yaml`.*?\n((?:    [^\n]+\n)+)", TRAINING, re.MULTILINE | re.DOTALL)
    (folder / "run.yaml").write_text(textwrap.dedent(settings).replace("Qwen/Qwen3-0.6B", "model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        common = ["--data", "chats.jsonl", "--steps", "1", "--device", "cpu"]
        assert main(["train", "model", "--output", "run", *common]) == 0
        for name in ("sft", "dpo", "lora-run"):
            assert main(["train", "model", "--output", name, "--lora", *common]) == 0
        assert main(["tokenize", "model", "--data", "texts/", "--output", "corpus"]) == 0
    return folder


def tiny(words):
    """A command's words for tiny models: names, lengths and sizes are changed."""
    named = r"MODEL|demo-output/run|(?:meta-llama|Qwen|google|zai-org|openai)/[\w.-]+"
    for printed, used in SMALLER.items():
        words = [word.replace(printed, used) for word in words]
    words = ["model" if re.fullmatch(named, word) else word for word in words]
    if words[0] in ("init", "train"):
        words = ["llama-demo" if word == "llama-3.2-1b" else word for word in words]
    if words[0] == "train":
        for option in ("--epochs", "--steps", "--seq-len", "--batch-size"):
            if option in words:
                del words[(at := words.index(option)) : at + 2]
        words += ["--steps", "1", "--batch-size", "4", "--seq-len", "64", "--device", "cpu"]
        words += ["--max-new-tokens", "16"] * ("grpo" in words)
    if words[0] in ("generate", "chat"):
        words += ["--max-new-tokens", "2", "--device", "cpu"]
    return words


@pytest.fixture
def hub(monkeypatch):
    """Data sets of the hub, with forty rows."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "abc de fgh"}] * 40)
    splits = {"train": SimpleNamespace(num_examples=40)}
    info = SimpleNamespace(info=SimpleNamespace(splits=splits))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows.to_iterable_dataset())
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: info)
    monkeypatch.setattr(tables, "commit_of", lambda name: "c0")
    monkeypatch.setattr("liger_models.training.data.streaming.commit_of", lambda name: "c0")


TRAINING = (ROOT / "docs/training.md").read_text()
RUN = [(page, command) for page, command in COMMANDS if not reasons(command)]


@pytest.mark.parametrize("page", dict.fromkeys(page for page, _ in RUN))
@pytest.mark.filterwarnings("ignore")
def test_every_command_runs(page, shelf, hub, tmp_path, monkeypatch):
    for entry in shelf.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    said = iter(["Tea?"])
    monkeypatch.setattr(builtins, "input", lambda _: next(said, "/exit"))
    for command in (command for name, command in RUN if name == page):
        words, _, given = command.partition(" < ")
        words = tiny(shlex.split(words)[1:])
        if given:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path(given).read_bytes())))
        output = output_of(words)
        if output and output.is_symlink():
            output.unlink()  # the page writes its own
        elif output and output.exists():
            shutil.rmtree(output)
        assert main(words) == 0, (command, words)


def output_of(words):
    """The folder that a command writes, or None."""
    if "--output" in words:
        return Path(words[words.index("--output") + 1])
    if "--config" in words:
        return Path("run")
    return Path(words[2]) if words[0] in ("export", "init", "merge") else None


def test_every_reason_is_needed_and_alone():
    for _, command in COMMANDS:
        assert PROGRAM.match(command)[1] == "liger-models" or reasons(command), command
    for pattern in NOT_RUN:
        assert any(re.fullmatch(pattern, command) for _, command in COMMANDS), pattern
