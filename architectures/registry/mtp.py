"""Multi-token prediction modules of a family's checkpoints, which a model has on request.

    @register(..., mtp=MTP(spec_of_modules, (Layout(root="model.layers."),)))

Without the request their tensors are carried along, unread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec, MTPSpec


@dataclass(frozen=True)
class MTP:
    """Modules of a family.

    Attributes:
        spec: their spec, from a config and the spec of its decoder.
        names: their names in checkpoints after `mtp.`, as the `rename` and `root` of layouts; a checkpoint
            has one of these. The renames of the family's own layout follow.
    """

    spec: Callable[[HFConfig, ModelSpec], MTPSpec]
    names: tuple[Layout, ...]

    def layouts(self, decoder: Layout) -> Iterator[Layout]:
        """The layouts of checkpoints with the modules. Where the decoder's tensors are packed, those of the
        modules may be packed or separate.
        """
        separate = tuple(f"layers{pattern}" if pattern[0] == "*" else pattern for pattern in decoder.whole)
        for names in self.names:
            part = replace(names, rename=names.rename + decoder.rename)
            for whole in dict.fromkeys((decoder.whole, separate)):
                yield replace(decoder, whole=whole, parts=(*decoder.parts, ("mtp.", part)))


def spec_with_mtp(
    decoder: Callable[[HFConfig], ModelSpec],
    modules: Callable[[HFConfig, ModelSpec], MTPSpec],
    config: HFConfig,
) -> ModelSpec:
    """The spec of a decoder and its modules, from functions that give each."""
    spec = decoder(config)
    return replace(spec, mtp=modules(config, spec))
