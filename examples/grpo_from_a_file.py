"""GRPO from the command line: a tiny model with fresh weights learns to write vowels.

    python examples/grpo_from_a_file.py [FOLDER]

Writes a tokenizer, a checkpoint, prompts and rewards.py into the folder (default: a temporary one), and runs

    liger-models train FOLDER/model --objective grpo \\
      --reward FOLDER/rewards.py:vowels --data FOLDER/prompts.jsonl
"""

import argparse
import json
import string
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import liger_models
from liger_models.cli import main as liger

REWARD = '''
def vowels(completions, **others):
    """The number of vowels per place of the answer."""
    return [sum(letter in "aeiou" for letter in text) / 8 for text in completions]
'''


def main(folder: Path, steps: int) -> int:
    (folder / "model").mkdir(parents=True, exist_ok=True)
    vocabulary = {token: n for n, token in enumerate(["</s>", *string.ascii_lowercase])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    torch.manual_seed(0)
    shape = {
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 128,
    }
    shape |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "eos_token_id": 0,
    }
    liger_models.from_config(shape, device="cpu").save_pretrained(folder / "model")
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "rewards.py").write_text(REWARD)
    lines = (json.dumps({"prompt": letter}) + "\n" for letter in string.ascii_lowercase)
    (folder / "prompts.jsonl").write_text("".join(lines))
    command = f"train {folder}/model --objective grpo --reward {folder}/rewards.py:vowels"
    command += f" --data {folder}/prompts.jsonl --output {folder}/run --steps {steps} --lr 5e-3 --seq-len 16"
    command += " --batch-size 8 --max-new-tokens 8 --weight-decay 0"
    code = liger(command.split())
    rewards = [json.loads(line)["reward"] for line in (folder / "run" / "metrics.jsonl").open()]
    print(f"reward: {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last")
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    raise SystemExit(main(args.folder or Path(tempfile.mkdtemp()), args.steps))
