"""Checkpoints for resuming a run with bitwise identical results.

    output/checkpoint-N/                    a Hugging Face checkpoint, or a PEFT adapter, ready for use, and
        training_state/state.json           step, position in the data, settings, Python's random state
        training_state/tensors.safetensors  optimizer state, torch's random state
        .written.json                       a checksum of each file (run_folder.py)

Weights are written in their training dtypes, whatever the source's, so that nothing is lost. Optimizer
tensors are in a folder of their own because loaders take every .safetensors next to config.json for weights.
A folder named checkpoint-N is complete: it is written under another name and renamed. Before use, contents
are verified against the checksums and against this model's and optimizer's state: fused kernels trust its
shapes and dtypes.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.atomic import naming
from liger_models.convert.checkpoints.expressions import Ref
from liger_models.convert.checkpoints.hub import CHAT_TEMPLATES, belongs_to
from liger_models.convert.checkpoints.reading import CheckpointReader
from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.checkpoints.shards import is_sharded, local_part
from liger_models.convert.checkpoints.tensor_files import TensorFiles
from liger_models.convert.errors import CheckpointError
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.training.checkpoints.contents import Contents, Part
from liger_models.training.checkpoints.run_folder import STATE, checkpoints, prune, verify
from liger_models.training.data import START, Position
from liger_models.training.processes.world import World
from liger_models.training.text.tokenizer import FILES

VERSION = 2


@dataclass
class Progress:
    """Progress of a run: steps done, inputs read, and the next row of data."""

    step: int = 0
    tokens: int = 0
    position: Position = START


def newest_checkpoint(output: str | Path) -> Path | None:
    """Checkpoint with the most steps in a run's folder; None without checkpoints."""
    found = checkpoints(Path(output))
    return found[-1] if found else None


def find_whole_checkpoint(
    output: Path, say: Callable[[str], None]
) -> tuple[Path, dict[str, Any]] | tuple[None, None]:
    """The newest undamaged checkpoint and its state; (None, None) without checkpoints.

    Raises:
        CheckpointError: all checkpoints are damaged.
    """
    damage: list[str] = []
    for checkpoint in reversed(checkpoints(output)):
        try:
            state = read_state(checkpoint)
        except CheckpointError as error:
            damage.append(str(error))
            say(f"{checkpoint} is damaged, skipping it: {error}")
        else:
            return checkpoint, state
    if damage:
        raise CheckpointError(
            f"every checkpoint in {output} is damaged: {'; '.join(damage)}. Start a new run in another folder"
        )
    return None, None


def describe_state(
    output: Path,
    trained: Trained,
    model: LigerCausalLM,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    *,
    config: dict[str, Any],
    data: str,
    tokenizer: Path,
    keep: int,
    stream: dict[str, Any] | None = None,
) -> Contents:
    """Contents of output/checkpoint-<step>; when complete, all but the newest `keep` are deleted if that is
    above 0.

    `trained` is the trained part of the model; `data` is the data's fingerprint, and `stream` the state of
    their reader, if they are streamed.
    """
    target = output / f"checkpoint-{progress.step}"
    tensors, numbers = _optimizer_state(model, optimizer)
    tensors |= _random_tensors()
    state = {
        "version": VERSION,
        "step": progress.step,
        "tokens": progress.tokens,
        "position": progress.position._asdict(),
        "data": data,
        "config": config,
        "optimizer": numbers,
        "python_random": random.getstate(),
        "stream": stream,
    }
    text = json.dumps(state, indent=1)
    files = TensorFiles.single("tensors.safetensors", tensors)
    places = {name: Ref(name, tuple(x.shape)) for name, x in tensors.items()}
    if not World.is_main():  # only its random states matter
        tensors = {name: x for name, x in tensors.items() if not name.startswith("random.")}

    def lay_out(folder: Path) -> None:
        _lay_out(trained, folder, tokenizer)
        (folder / STATE).mkdir()
        files.lay_out(folder / STATE)
        path = folder / STATE / "state.json"
        with naming(path):
            path.write_text(text, encoding="utf-8")

    parts = (*trained.parts, Part(STATE, files, places, tensors))
    return Contents(target, parts, lay_out, lambda: prune(output, keep) if keep else None)


def describe_export(
    target: Path, trained: Trained, tokenizer: Path, notes: Mapping[str, str] | None = None
) -> Contents:
    """The trained model with its tokenizer, which freshly initialised models do not have, and with `notes`,
    texts by file name.
    """

    def lay_out(folder: Path) -> None:
        _lay_out(trained, folder, tokenizer)
        for name, text in (notes or {}).items():
            with naming(folder / name):
                (folder / name).write_text(text, encoding="utf-8")

    return Contents(target, trained.parts, lay_out)


@dataclass(frozen=True)
class Trained:
    """The trained weights, as files.

    Attributes:
        lay_out: writes them to an empty folder, without the values of `parts`.
        parts: their tensors.
    """

    lay_out: Callable[[Path], None]
    parts: tuple[Part, ...] = ()

    @classmethod
    def of_model(cls, model: LigerCausalLM) -> Trained:
        """A Hugging Face checkpoint in the training dtypes."""
        plan = model.checkpoint_plan(dtype="parameters")
        part = Part("", plan.files, model.weight_map(), model.saved_tensors())
        return cls(plan.lay_out, (part,))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read state.json of a checkpoint folder after verifying all of its files.

    Raises:
        CheckpointError: missing state, another version, or a missing or damaged file.
    """
    path = checkpoint / STATE / "state.json"
    if not path.is_file():
        raise CheckpointError(
            f"{checkpoint} holds no training state ({path.name} is missing); pass a checkpoint-N folder that "
            "training wrote, or start a new run from these weights without --resume"
        )
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    version = state.get("version") if isinstance(state, dict) else None
    if version != VERSION:
        raise CheckpointError(f"{path} has version {version!r:.20}; this program reads {VERSION}")
    verify(checkpoint)
    if problem := _problem(state):
        raise CheckpointError(f"{path}: {problem}; resume from another checkpoint")
    return state


def _problem(state: dict[str, Any]) -> str | None:
    """Reason why a state.json of the right version is unusable, or None."""
    kinds = {"step": int, "tokens": int, "position": dict, "data": str, "config": dict, "optimizer": dict}
    for key, kind in kinds.items():
        if type(state.get(key)) is not kind:
            return f"{key} must be {kind.__name__}, found {state.get(key)!r:.100}"
    position = state["position"]
    counts = [state["step"], state["tokens"], *position.values()]
    if position.keys() != set(Position._fields) or not all(type(n) is int and n >= 0 for n in counts):
        return f"step, tokens and position must be counts, found {counts!r:.100}"
    try:
        _python_random(state).getstate()
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        return f"python_random is not a state of Python's random module ({error})"
    return None


def _python_random(state: dict[str, Any]) -> random.Random:
    version, internal, gauss = state["python_random"]
    generator = random.Random()
    generator.setstate((version, tuple(internal), gauss))
    return generator


def restore(
    checkpoint: Path, state: dict[str, Any], model: LigerCausalLM, optimizer: torch.optim.Optimizer
) -> Progress:
    """Restore the optimizer's state and the random states; `model` was loaded from the checkpoint itself.

    Raises:
        CheckpointError: they do not match this model and this optimizer. Nothing is changed then.
    """
    folder = checkpoint / STATE
    with CheckpointReader(folder) as reader:
        planned = _plan_optimizer_state(folder, reader.tensors, state["optimizer"], model, optimizer)
        random_states = [("random.torch", torch.get_rng_state, torch.set_rng_state)]
        if "random.cuda" in reader.tensors and torch.cuda.is_available():
            random_states.append(("random.cuda", torch.cuda.get_rng_state, torch.cuda.set_rng_state))
        if "random.mps" in reader.tensors and torch.backends.mps.is_available():
            random_states.append(("random.mps", torch.mps.get_rng_state, torch.mps.set_rng_state))
        for name, current, _ in random_states:
            like = current()
            found = reader.tensors.get(name)
            if found is None or (found.dtype, found.shape) != (like.dtype, tuple(like.shape)):
                raise CheckpointError(
                    f"{folder}: {name} must be {(like.dtype, tuple(like.shape))}, as in this version of "
                    f"torch, found {found and (found.dtype, found.shape)}; resume with the torch that "
                    "wrote it"
                )
        device = getattr(optimizer, "state_device", None)
        for parameter, values in planned.items():
            optimizer.state[parameter] = {
                key: _read(reader, value, parameter, device) if isinstance(value, TensorInfo) else value
                for key, value in values.items()
            }
        for name, _, change in random_states:
            change(reader.read(name))
    random.setstate(_python_random(state).getstate())
    return Progress(state["step"], state["tokens"], Position(**state["position"]))


def _read(reader: CheckpointReader, info: TensorInfo, parameter: Tensor, device: str | None) -> Tensor:
    """Read a tensor of a parameter's state, on `device` or the parameter's; for a sharded parameter, this
    process's shard.
    """
    if not is_sharded(parameter) or info.shape != tuple(parameter.shape):
        return reader.read(info.name).to(device or parameter.device)
    value = torch.empty_like(parameter, dtype=info.dtype, device=device)
    local, part = local_part(value, Ref(info.name, info.shape))
    part.read_into(local, reader.read_into)
    return value


# -------------------------------------------------------------------------------------- the optimizer's state


def _optimizer_state(
    model: LigerCausalLM, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Its tensors as `<key>.<parameter>`, and other values by parameter and key."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{key}.{name}"] = value
            else:
                numbers.setdefault(name, {})[key] = value
    return tensors, numbers


def _plan_optimizer_state(
    folder: Path,
    tensors: dict[str, TensorInfo],
    numbers: dict[str, Any],
    model: LigerCausalLM,
    optimizer: torch.optim.Optimizer,
) -> dict[Tensor, dict[str, Any]]:
    """Expected tensors and numbers of each parameter's state, as the optimizer would create them."""

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{folder}: the optimizer's state {what}; resume from another checkpoint")

    left = {name for name in tensors if not name.startswith("random.")}
    planned: dict[Tensor, dict[str, Any]] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            stated = numbers.get(name, {})
            made = _state_made_for(optimizer, group, parameter)
            if not any(f"{key}.{name}" in tensors or key in stated for key in made):
                continue  # no gradient so far
            planned[parameter] = {}
            for key, like in made.items():
                found: Any = tensors.get(f"{key}.{name}", stated.get(key))
                kept = (found.dtype, found.shape) if isinstance(found, TensorInfo) else type(found)
                if kept != like:
                    raise refuse(f"has {kept} as {key} of {name}, expected {like}")
                planned[parameter][key] = found
                left.discard(f"{key}.{name}")
    if left:
        raise refuse(f"has {min(left)}, which this model and this optimizer do not have")
    return planned


def _state_made_for(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> dict[str, Any]:
    """State that this optimizer, of any kind, keeps for a parameter: (dtype, shape) of tensors, types of
    other values.

    Optimizers whose state depends on the sizes define `new_state`. Of others it is found by a step on a
    stand-in with two elements along each dimension.
    """
    ask = getattr(optimizer, "new_state", None)
    if ask is not None and (made := ask(group, parameter)) is not None:
        return {k: (x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else type(x) for k, x in made.items()}
    stand_in = torch.zeros((2,) * parameter.ndim, dtype=parameter.dtype, device=parameter.device)
    stand_in.grad = torch.zeros_like(stand_in)
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.state = defaultdict(dict)
    copy.param_groups = [{**group, "params": [stand_in]}]
    type(optimizer).step(copy)

    def kept(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return type(value)
        shape = tuple(value.shape)
        if value.ndim == parameter.ndim:  # sizes of 1 are row or column statistics
            shape = tuple(whole if n == 2 else n for n, whole in zip(shape, parameter.shape, strict=True))
        return value.dtype, shape

    return {key: kept(value) for key, value in copy.state[stand_in].items()}


# ------------------------------------------------------------------------------------------------------ files


def _lay_out(trained: Trained, folder: Path, tokenizer: Path) -> None:
    trained.lay_out(folder)
    templates = sorted((tokenizer / CHAT_TEMPLATES).glob("*.jinja"))
    for name in (*FILES, *(f"{CHAT_TEMPLATES}/{path.name}" for path in templates)):
        source = tokenizer / name
        if source.is_file() and belongs_to(source, tokenizer):  # instead of the base model's
            (folder / name).parent.mkdir(exist_ok=True)
            with naming(folder / name):
                shutil.copyfile(source, folder / name)


def _random_tensors() -> dict[str, Tensor]:
    tensors = {"random.torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        tensors["random.mps"] = torch.mps.get_rng_state()
    return tensors
