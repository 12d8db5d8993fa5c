"""A tokenizer and a checkpoint small enough to train in a second, and runs over them."""

import json
import random
from pathlib import Path

import pytest
import torch
from drawn import write_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import liger_models
from liger_models.architectures import find_architecture
from liger_models.training import TrainConfig, loop, train

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def sentence(rng: random.Random) -> str:
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 40))]
    return " ".join(words) + rng.choice([".", "\n", " é?", "\n\n"])


def words(rng: random.Random, most: int) -> str:
    return " ".join("".join(rng.choices("abcdefghij", k=4)) for _ in range(rng.randint(1, most)))


def write_jsonl(path: Path, records: list) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Folder of tokenized data, for this process and subprocesses."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "liger_models" / "data"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """Byte-level BPE that puts <s> first, as LLaMA's tokenizers do, with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    rng = random.Random(0)
    tokenizer.train_from_iterator(
        [sentence(rng) for _ in range(200)],
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tiny_shape():
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": 320,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory, tiny_shape, tokenizer_folder):
    """Factory of checkpoint folders in a dtype, with a tokenizer and random parameters."""

    def make(dtype=torch.float32):
        folder = tmp_path_factory.mktemp("checkpoint") / "model"
        torch.manual_seed(1)
        model = liger_models.from_config(tiny_shape, dtype=dtype, device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                noise = 0.05 * torch.randn(parameter.shape)
                parameter.copy_(noise if parameter.ndim > 1 else 1 + noise)
        model.save_pretrained(folder)
        for file in tokenizer_folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return make


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory):
    """Checkpoint of a tiny Qwen2.5-VL with fresh weights, a tokenizer and a processor."""
    folder = tmp_path_factory.mktemp("vision_model") / "model"
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint()


@pytest.fixture
def checkpoint_of_experts(tmp_path, tokenizer_folder):
    """Checkpoint of GLM-4.5's tiny config with the tokenizer's vocabulary and fresh weights."""
    folder = tmp_path / "experts"
    torch.manual_seed(3)
    liger_models.from_config(
        {**find_architecture("glm4_moe").tiny, "vocab_size": 320}, device="cpu"
    ).save_pretrained(folder)
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """File of texts, and of prompts with completions, of very different lengths."""
    rng = random.Random(1)
    records = [{"text": sentence(rng)} for _ in range(30)]
    for _ in range(20):
        records.append({"prompt": sentence(rng)[:40], "completion": sentence(rng)[: rng.randint(1, 30)]})
    rng.shuffle(records)
    return write_jsonl(tmp_path_factory.mktemp("data") / "data.jsonl", records)


@pytest.fixture(scope="session")
def judged(tmp_path_factory, jsonl):
    """Files of answer pairs and of labelled answers, of very different lengths, as text and as messages."""
    folder, rng = tmp_path_factory.mktemp("judged"), random.Random(2)
    pairs = [{"prompt": words(rng, 5), "chosen": words(rng, 6), "rejected": words(rng, 3)} for _ in range(16)]

    def turn(role):
        return [{"role": role, "content": words(rng, 4)}]

    pairs += [
        {"prompt": turn("user"), "chosen": turn("assistant"), "rejected": turn("assistant")} for _ in range(4)
    ]
    labelled = [{"prompt": words(rng, 5), "completion": words(rng, 6), "label": i % 3 > 0} for i in range(20)]
    return {
        "pairs": jsonl(folder / "pairs.jsonl", pairs),
        "labelled": jsonl(folder / "labelled.jsonl", labelled),
    }


@pytest.fixture(scope="session")
def settings_for(checkpoint, data):
    """Factory of the TrainConfig of a one-second run into a folder; keywords replace settings."""

    def make(output, **changes) -> TrainConfig:
        options = {
            "model": str(checkpoint),
            "data": (data,),
            "output": str(output),
            "seq_len": 64,
            "batch_size": 1,
            "gradient_accumulation": 2,
            "steps": 6,
            "lr": 3e-3,
            "warmup": min(2, changes.get("steps") or 2),
            "eval_fraction": 0.1,
            "eval_every": 2,
            "save_every": 2,
            "device": "cpu",
        }
        return TrainConfig(**options | changes)

    return make


@pytest.fixture
def settings(tmp_path, settings_for):
    return lambda **changes: settings_for(**{"output": tmp_path / "run"} | changes)


@pytest.fixture
def losses():
    """Function that returns steps and losses of a finished run, training and held-out, without times."""

    def read(result):
        return [(r["step"], r.get("loss"), r.get("grad_norm"), r.get("eval_loss")) for r in result.records]

    return read


@pytest.fixture(scope="session")
def jsonl():
    return write_jsonl


@pytest.fixture
def run():
    return train


@pytest.fixture
def start(settings):
    """Factory of runs before their first step; keywords replace settings."""

    def make(**changes):
        config = settings(eval_fraction=0.0, **changes)
        return loop.Run(config, loop.World(config.device))

    return make
