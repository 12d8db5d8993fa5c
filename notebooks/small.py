"""A small model for the notebooks, so that they run on a laptop without a network.

On a GPU use a real one instead, such as "Qwen/Qwen3-0.6B"; the other cells stay as they are.
"""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import liger_models

CONFIG = {
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,  # <|end|>
    "pad_token_id": 0,
}
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|user|>' if message.role == 'user' else '<|assistant|>' }}{{ message.content }}
{%- if message.role == 'assistant' %}{{ '<|end|>' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}"""


def model(folder: str = "small", **changes) -> str:
    """Write a checkpoint with random weights and a tokenizer of bytes; returns its folder."""
    torch.manual_seed(0)
    liger_models.from_config(CONFIG | changes, dtype="float32").save_pretrained(folder)
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, []))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(f"{folder}/tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder


def trained_model(folder: str = "trained") -> str:
    """Write a checkpoint of such a model that has learned the answers of `conversations`; takes seconds."""
    fresh, data = model(f"{folder}-fresh"), write(f"{folder}.jsonl", conversations())
    settings = {"epochs": 60, "seq_len": 64, "batch_size": 4, "lr": 5e-3, "warmup": 5, "save_every": 0}
    config = liger_models.TrainConfig(model=fresh, data=(data,), output=f"{folder}-run", **settings)
    return str(liger_models.train(config).final)


def write(name: str, records: list[dict]) -> str:
    """Write records as JSON lines; returns the name."""
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return name


# What there is to say.
THINGS = {"tea": "hot", "soup": "warm", "bread": "fresh", "cake": "sweet", "milk": "cold", "jam": "red"}


def conversations() -> list[dict]:
    """Questions about a few things, with their answers."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"How is the {thing}?"},
                {"role": "assistant", "content": f"The {thing} is {word}."},
            ]
        }
        for thing, word in THINGS.items()
    ]


def pairs() -> list[dict]:
    """Questions with a polite answer, which is chosen, and a rude one."""
    return [
        {
            "prompt": [{"role": "user", "content": f"How is the {thing}?"}],
            "chosen": [{"role": "assistant", "content": f"The {thing} is {word}, thank you."}],
            "rejected": [{"role": "assistant", "content": f"The {thing} is {word}, go away."}],
        }
        for thing, word in THINGS.items()
    ]
