"""Axolotl plugin that trains our models:

    plugins:
      - liger_models.hf.axolotl.LigerModelsPlugin

The class is created on first access, since its base class is Axolotl's.
"""

from __future__ import annotations

import functools
from typing import Any

from liger_models.hf.families import register


def __getattr__(name: str) -> Any:
    if name != "LigerModelsPlugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _plugin()


@functools.cache
def _plugin() -> type:
    from axolotl.integrations.base import BasePlugin

    class LigerModelsPlugin(BasePlugin):  # type: ignore[misc]
        """Switches transformers' Auto classes to our models before Axolotl loads one through them."""

        def pre_model_load(self, cfg: Any) -> None:
            """Register our models, with split projections for adapters: `lora_target_modules` names them."""
            register("split" if cfg.get("adapter") else "fused")

    return LigerModelsPlugin
