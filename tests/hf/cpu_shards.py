"""Let accelerate shard models over CPUs, which it otherwise does only over accelerators."""

import os
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def let_cpus_shard() -> None:
    """Make accelerate (and so Trainer) accept its FSDP and DeepSpeed plugins on CPUs."""
    if "DS_ACCELERATOR" in os.environ:
        import deepspeed

        # Gloo does the work of this operation, which would have to be compiled.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    begin = AcceleratorState.__init__

    def begin_sharded(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        deepspeed = options.get("deepspeed_plugin") if "ACCELERATE_USE_DEEPSPEED" in os.environ else None
        begin(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if self.distributed_type != DistributedType.MULTI_CPU or not (fsdp_plugin or deepspeed):
            return
        precision = self._mixed_precision
        if deepspeed is not None:
            self.distributed_type, self.deepspeed_plugins = DistributedType.DEEPSPEED, deepspeed
            deepspeed.set_mixed_precision(precision)
            deepspeed.select(_from_accelerator_state=True)
            self._mixed_precision = "no"
        else:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            if precision != "no":
                fsdp_plugin.set_mixed_precision(precision)
        PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = begin_sharded
