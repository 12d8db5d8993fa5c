"""Names and settings that several encoders share."""

from __future__ import annotations

from liger_models.architectures.common.images import Names
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError


def halvings(a: HFConfig, key: str) -> int:
    """How often the factor under `key` halves the number of columns; 3 times if it is absent.

    Raises:
        ConfigError: it is not a power of two.
    """
    factor = a.take_count(key, 8, least=2)
    count = factor.bit_length() - 1
    if factor != 2**count or count > 10:
        raise ConfigError(f"{a.name}: {key} must be a power of two up to 1024, found {factor}")
    return count


def subsampling_names(root: str) -> Names:
    """Names of convolutions with stride 2, which are numbered in a sequence after `root`: the first, and two
    of each further halving with an activation between them.
    """
    return (
        (".subsampling.layer0.conv.", f"{root}0."),
        *(
            (f".subsampling.layer{k}.{here}.", f"{root}{number}.")
            for k in range(1, 10)
            for here, number in (("conv", 3 * k - 1), ("pointwise", 3 * k))
        ),
    )
