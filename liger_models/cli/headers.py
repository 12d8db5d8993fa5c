"""Models on the meta device in the quantised bits of a checkpoint; only its headers are read."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liger_models.models.causal_lm import LigerCausalLM


def keep_quantised(args: argparse.Namespace, model: LigerCausalLM) -> None:
    """Split a model's projections, and keep the weights that its checkpoint has quantised.

    Args:
        args: of `plan`: the checkpoint is a folder, a run or a repository.

    Raises:
        ConfigError: the checkpoint has no quantised weights, or there are no adapters.
        UnsupportedModelError: one cannot be kept.
    """
    from liger_models.cli.inspect import checked_tensors, find_config, remote_tensors
    from liger_models.convert.checkpoints.hub import latest_in_run
    from liger_models.convert.errors import ConfigError
    from liger_models.models.stored_weights import keep_stored

    if args.lora is None or args.quantize:
        raise ConfigError("--keep-quantised needs --lora, and no --quantize")
    name = str(latest_in_run(args.model))
    config, headers, folder = find_config(name)
    if folder is not None:
        tensors, quantisation = checked_tensors(folder, model)
    elif headers:
        tensors, quantisation = remote_tensors(name, config, headers, model)
    else:
        quantisation = None
    if quantisation is None:
        raise ConfigError(f"--keep-quantised: {name} has no quantised weights; omit it")
    model.split_projections()
    keep_stored(model, tensors, folder or Path(name))
