"""Checkpoints that a run can go on from, with the same bits as a run that was never stopped.

    output/checkpoint-N/                    a Hugging Face checkpoint, ready for use, and beside it
        training_state/state.json           step, position in the data, settings, Python's random state
        training_state/tensors.safetensors  AdamW's state, torch's random state

The weights are written in the dtype of training, whatever the source's was: no bit of them is lost. The
tensors stand in a folder of their own because loaders take every .safetensors beside config.json for
weights. A folder named checkpoint-N is whole: it is written under another name and renamed.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_models.causal_lm import LigerCausalLM
from liger_models.convert.checkpoints.atomic import atomic_folder
from liger_models.convert.errors import CheckpointError
from liger_models.optim import STATE_TENSORS, AdamW
from liger_models.training.data import START, Position, tensor_bytes
from liger_models.training.tokenizer import FILES

STATE = "training_state"
VERSION = 1


@dataclass
class Progress:
    """How far a run has come: steps done, inputs read, and the next row of data."""

    step: int = 0
    tokens: int = 0
    position: Position = START


def newest_checkpoint(output: str | Path) -> Path | None:
    """The whole checkpoint with the most steps in a run's folder; None if there is none."""
    found = _checkpoints(Path(output))
    return found[-1] if found else None


def save_state(
    output: Path,
    model: LigerCausalLM,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    *,
    config: dict[str, Any],
    data: str,
    tokenizer: Path,
    keep: int,
) -> Path:
    """Write output/checkpoint-<step> and drop all but the newest `keep`. `data` is its fingerprint."""
    target = output / f"checkpoint-{progress.step}"
    with atomic_folder(target) as folder:
        _write_model(model, folder, tokenizer)
        (folder / STATE).mkdir()
        tensors = _optimizer_tensors(model, optimizer) | _random_tensors()
        write_tensors(folder / STATE / "tensors.safetensors", tensors)
        state = {
            "version": VERSION,
            "step": progress.step,
            "tokens": progress.tokens,
            "position": progress.position._asdict(),
            "data": data,
            "config": config,
            "python_random": random.getstate(),
        }
        (folder / STATE / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    if keep:
        for old in _checkpoints(output)[:-keep]:
            # Renamed first: a kill halfway must not leave half a folder under the name of a whole one.
            doomed = old.with_name(f".{old.name}.removed")
            old.rename(doomed)
        for doomed in output.glob(".checkpoint-*.removed"):
            shutil.rmtree(doomed, ignore_errors=True)
    return target


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint folder; CheckpointError if it has none or another version's."""
    path = checkpoint / STATE / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{checkpoint} holds no training state ({path.name} is missing); name a checkpoint-N folder that "
            "training wrote, or start a new run from these weights without --resume"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if state.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {state.get('version')!r}; this program reads {VERSION}")
    return state


def restore(checkpoint: Path, state: dict[str, Any], model: LigerCausalLM, optimizer: AdamW) -> Progress:
    """Put AdamW's state and the random states back; `model` was read from the checkpoint itself."""
    from safetensors import SafetensorError, safe_open

    path = checkpoint / STATE / "tensors.safetensors"
    try:
        opened = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error
    with opened as file:
        names = set(file.keys())
        stored = {name.removeprefix("step.") for name in names if name.startswith("step.")}
        if unknown := stored - {name for name, _ in model.named_parameters()}:
            raise CheckpointError(
                f"{checkpoint}: AdamW's state is of {min(unknown)}, which this model does not have"
            )
        _restore_optimizer(file, names, model, optimizer)
        torch.set_rng_state(file.get_tensor("random.torch"))
        if "random.cuda" in names and torch.cuda.is_available():
            torch.cuda.set_rng_state(file.get_tensor("random.cuda"))
    version, internal, gauss = state["python_random"]
    random.setstate((version, tuple(internal), gauss))
    return Progress(state["step"], state["tokens"], Position(**state["position"]))


def export(model: LigerCausalLM, target: Path, tokenizer: Path) -> None:
    """Write a Hugging Face checkpoint with its tokenizer, which a model with fresh weights does not carry."""
    with atomic_folder(target) as folder:
        _write_model(model, folder, tokenizer)


def _write_model(model: LigerCausalLM, folder: Path, tokenizer: Path) -> None:
    # In a folder of its own first: what a kill leaves of it goes when the next save clears `folder` away.
    part = folder / "part"
    model.save_pretrained(part, dtype=model.dtype)
    for file in part.iterdir():
        file.rename(folder / file.name)
    part.rmdir()
    for name in FILES:
        source = tokenizer / name
        if source.is_file() and not (folder / name).exists():
            shutil.copyfile(source, folder / name)


def _optimizer_tensors(model: LigerCausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
    }


def _restore_optimizer(file: Any, stored: set[str], model: LigerCausalLM, optimizer: AdamW) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        place: {
            key: file.get_tensor(f"{key}.{names[parameter]}").to(parameter.device)
            for key in STATE_TENSORS
            if f"{key}.{names[parameter]}" in stored
        }
        for place, parameter in enumerate(parameters)
        if f"step.{names[parameter]}" in stored
    }
    try:
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    except ValueError as error:
        raise CheckpointError(
            f"AdamW's state cannot be used: {error}; resume from another checkpoint"
        ) from error


def _random_tensors() -> dict[str, Tensor]:
    tensors = {"random.torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    return tensors


DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
}


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, written one tensor at a time: a GPU's state never stands on the host as a whole."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        stop = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor_bytes(tensor.detach().cpu()))


def _checkpoints(output: Path) -> list[Path]:
    found = {
        int(match[1]): path
        for path in output.glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and (path / STATE / "state.json").is_file()
    }
    return [found[step] for step in sorted(found)]
