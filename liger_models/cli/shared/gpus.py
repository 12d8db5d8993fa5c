"""The memory that `plan` may use: of GPUs by their common names, and of the host."""

import argparse
import re

# GiB available to a program: for H200 and H100 as the driver reports it, for the others slightly below the
# vendors' figures.
GPUS = {
    "B200": 178.0,
    "H200": 139.8,
    "H100": 79.1,
    "H100-NVL": 93.0,
    "A100": 79.1,
    "A100-80GB": 79.1,
    "A100-40GB": 39.4,
    "A40": 44.4,
    "A10": 22.0,
    "A10G": 22.0,
    "L40S": 44.4,
    "L40": 44.4,
    "L4": 22.0,
    "T4": 14.6,
    "V100": 31.5,
    "V100-16GB": 15.6,
    "RTX-PRO-6000": 94.9,
    "RTX-6000-Ada": 47.4,
    "RTX-A6000": 47.4,
    "RTX5090": 31.4,
    "RTX5080": 15.5,
    "RTX4090": 23.5,
    "RTX4080": 15.5,
    "RTX3090": 23.5,
    "MI300X": 191.0,
    "MI325X": 255.0,
}
_LEAST = 2**30  # bytes: a smaller "memory size" is a mistyped name


def find_gpu(name: str | None) -> tuple[str, int]:
    """The name and the memory, in bytes, of a GPU.

    Args:
        name: a name such as H100, 3090 or "A100 80GB"; a memory size such as 80GiB; or None for the GPU of
            this machine.

    Raises:
        ConfigError: an unknown name, or None on a machine without a GPU.
    """
    from liger_models.convert.errors import ConfigError
    from liger_models.layers.memory import parse_budget

    if name is None:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "no GPU was found on this machine; pass --gpu, such as --gpu H100 or --gpu 80GiB"
            )
        return torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
    for known, memory in GPUS.items():
        if _plain(known) == _plain(name):
            return known, int(memory * 2**30)
    try:
        count = parse_budget(name)[1]
    except ValueError:
        count = None
    if count is None or count < _LEAST:
        raise ConfigError(
            f"unknown GPU {name!r}; pass its memory, such as 80GiB, or one of {', '.join(GPUS)}"
        )
    return name, count


def limits_of(args: argparse.Namespace) -> tuple[str, int, int, int | None]:
    """The GPU's name, its memory, the part of it that a plan may use, and host memory per GPU or None, all in
    bytes.

    Raises:
        ConfigError: an unknown GPU, or sizes that cannot be used.
    """
    from liger_models.convert.errors import ConfigError
    from liger_models.layers.memory import parse_budget

    gpu, memory = find_gpu(args.gpu)
    if args.memory_budget is not None and args.activation_memory != "auto":
        raise ConfigError("--memory-budget requires --activation-memory auto")
    sharded = args.gpus > 1 and sharding_of(args) != "none"
    try:
        share, given = parse_budget(args.memory_budget, sharded)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    budget = min(memory, given) if given is not None else int(share * memory)
    return gpu, memory, budget, None if args.host_memory is None else _host_size(args.host_memory)


def sharding_of(args: argparse.Namespace) -> str:
    """--shard, or its default as in `train`: with adapters each process has the whole model."""
    return args.shard or ("full" if args.lora is None else "none")


def _host_size(text: str) -> int:
    from liger_models.convert.errors import ConfigError
    from liger_models.convert.sizes import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--host-memory is {text!r}; expected a size such as 256GiB") from error


def _plain(name: str) -> str:
    """A name without vendor, product line, separators and unit: "3090" for "NVIDIA GeForce RTX 3090"."""
    words = re.sub(r"nvidia|geforce|tesla|amd|instinct|rtx|[^a-z0-9]", "", name.lower())
    return re.sub(r"(?<=\d)gi?b$", "", words)
