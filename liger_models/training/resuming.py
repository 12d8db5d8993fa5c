"""Finding the checkpoint to resume from, and checking that the run is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from liger_models.convert.checkpoints.hub import local_path
from liger_models.convert.errors import ConfigError, DataError
from liger_models.training.checkpoints.run_folder import MANIFEST, check_output
from liger_models.training.checkpoints.state import find_whole_checkpoint, read_state
from liger_models.training.config import TrainConfig
from liger_models.training.objectives import OBJECTIVES
from liger_models.training.processes.world import World

# Settings that may differ when a run is resumed.
_PLACES = (
    *("resume", "output", "data", "columns", "split", "eval_data", "data_cache", "verify_data", "tokenizer"),
    *("log", "log_every", "sample_prompts", "profile"),
)
# Settings that choose the tokens of a run.
_OF_DATA = {
    *("data", "eval_data", "eval_fraction", "columns", "split", "streaming", "shuffle_buffer"),
    *("tokenizer", "truncate", "train_on", "max_image_pixels"),
}
# Settings that change the model or its training state, and so must stay as they were.
_OF_MODEL = (
    *("objective", "seq_len", "seed", "dtype", "optimizer", "freeze", "train_only", "add_tokens", "weights"),
    *("moments", "lora", "adapter", "quantize", "keep_quantised", "float8"),
)


def find_checkpoint(
    config: TrainConfig, world: World, output: Path
) -> tuple[Path, dict[str, Any]] | tuple[None, None]:
    """The checkpoint to resume from and its state, after checking the output folder; (None, None) for a new
    run.

    Raises:
        ConfigError: `output` is not writable, or contains a finished run.
        CheckpointError: the checkpoint is damaged, or all of them are.
    """
    if config.resume and config.resume != "auto":
        checkpoint = local_path(config.resume)
        found: Any = checkpoint, world.once(lambda: read_state(checkpoint))
    elif config.resume:
        found = world.once(lambda: find_whole_checkpoint(output, world.say))
        if not found[0] and (output / "final" / MANIFEST).is_file():
            raise ConfigError(
                f"{output} holds a finished run without a checkpoint to resume from; to train its model "
                f"further, start from {output / 'final'} with another --output"
            )
    else:
        found = None, None
    check_output(output, new=not config.resume, merge=config.merge)
    return found


def check_resumed(
    config: TrainConfig, world: World, checkpoint: Path, state: dict[str, Any], data: str
) -> None:
    """Check that this run continues the checkpoint's: its position in the data requires the same data and
    order.

    Args:
        data: fingerprint of this run's data.

    Raises:
        ConfigError: a setting that must not change has changed.
        DataError: the data have changed.
    """
    changed = config.differences(state["config"])
    # Not part of a checkpoint: the model below adapters, and the reference.
    model_matters = config.lora is not None or OBJECTIVES[config.objective].needs_reference
    for name in (*_OF_MODEL, *(("model",) if model_matters else ())):
        if name in changed:
            then, now = changed[name]
            raise ConfigError(
                f"{checkpoint} was trained with {name}={then}, but this run has {now}; keep {then}"
            )
    if state["data"] != data:
        settings = [
            f"{name}={changed[name][1]}, which was {changed[name][0]}" for name in _OF_DATA & changed.keys()
        ]
        found = ", ".join(sorted(settings)) or "a data file or the tokenizer has changed"
        raise DataError(
            f"{checkpoint} was trained on other tokens than these: {found}; restore it, or start a new run "
            "from these weights without --resume"
        )
    for name, (then, now) in changed.items():
        if name not in _PLACES:
            world.say(f"resuming with {name}={now}, which was {then}")
