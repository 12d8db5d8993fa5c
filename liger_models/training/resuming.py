"""Where a run goes on from, and whether it is still the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from liger_models.convert.checkpoints.hub import local_path
from liger_models.convert.errors import ConfigError, DataError
from liger_models.training.checkpoints.run_folder import MANIFEST, check_output
from liger_models.training.checkpoints.state import find_whole_checkpoint, read_state
from liger_models.training.config import PLACES, TrainConfig
from liger_models.training.objectives import OBJECTIVES
from liger_models.training.processes.world import World


def find_checkpoint(
    config: TrainConfig, world: World, output: Path
) -> tuple[Path, dict[str, Any]] | tuple[None, None]:
    """The checkpoint to go on from and its state, after a look at what stands in the way of a run; (None,
    None) for one that begins.

    Raises:
        ConfigError: `output` cannot be written to, or holds a run that is finished.
        CheckpointError: the checkpoint is damaged, or all of them are.
    """
    if config.resume and config.resume != "auto":
        checkpoint = local_path(config.resume)
        found: Any = checkpoint, world.once(lambda: read_state(checkpoint))
    elif config.resume:
        found = world.once(lambda: find_whole_checkpoint(output, world.say))
        if not found[0] and (output / "final" / MANIFEST).is_file():
            raise ConfigError(
                f"{output} holds a finished run without a checkpoint to go on from; to train its "
                f"model further, start from {output / 'final'} in another --output"
            )
    else:
        found = None, None
    check_output(output, new=not config.resume, merge=config.merge)
    return found


def check_resumed(
    config: TrainConfig, world: World, checkpoint: Path, state: dict[str, Any], data: str
) -> None:
    """Whether this run is that of the checkpoint: the position in the data means something only for the same
    data in the same order.

    Args:
        data: the fingerprint of this run's data.

    Raises:
        ConfigError: a setting that must stay has changed.
        DataError: the data have.
    """
    changed = config.differences(state["config"])
    # Which a checkpoint does not hold: the model below adapters, and the reference.
    beside = config.lora is not None or OBJECTIVES[config.objective].needs_reference
    of_model = ("dtype", "freeze", "weights", "moments", "lora", "quantize", *(("model",) if beside else ()))
    for name in ("objective", "seq_len", "seed", *of_model):
        if name in changed:
            then, now = changed[name]
            raise ConfigError(
                f"{checkpoint} was trained with {name}={then} and this run asks for {now}; keep {then}"
            )
    if state["data"] != data:
        raise DataError(
            f"{checkpoint} was trained on other tokens than these: a data file, its weight, the "
            "tokenizer, --truncate, --train-on or --eval-fraction has changed; restore it, or start a new "
            "run from these weights without --resume"
        )
    for name, (then, now) in changed.items():
        if name not in PLACES:
            world.say(f"resuming with {name}={now}, which was {then}")
