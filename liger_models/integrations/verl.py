"""A training engine for verl (0.9): `actor_rollout_ref.actor.strategy=liger`, with verl's FSDP settings.

verl imports this module through the entry point `verl.plugins`, and finds the engines in its registry: for
policies and references ("language_model"), and critics ("value_model"). Parameters, gradients and optimizer
state are sharded by `parallelize`; micro-batches are packed without padding, and scored without logits. See
examples/rl_with_verl.md for the settings, and for what is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from verl.utils import tensordict_utils as tu
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import (
    detach_tree,
    enable_full_determinism,
    postprocess_batch_func,
    prepare_micro_batches,
)

import liger_models
from liger_models.convert.errors import ConfigError, UnsupportedModelError
from liger_models.integrations.verl_checkpoints import load, save
from liger_models.integrations.verl_routes import routing_of
from liger_models.integrations.verl_settings import refuse, schedule_of, targets_of
from liger_models.integrations.verl_shards import SendsShards
from liger_models.losses import without_adapters
from liger_models.models.streaming import stream_weights
from liger_models.optim.adamw import clip_grad_norm_
from liger_models.parallel.dims import ParallelDims
from liger_models.parallel.sharding import parallelize
from liger_models.training.adapters.lora_settings import LoraSettings
from liger_models.training.lora import Adapters


@EngineRegistry.register("language_model", backend="liger", device=["cuda", "cpu"])
class LigerEngine(SendsShards, BaseEngine):
    """Engine of a policy or a reference."""

    labels: ClassVar[int | None] = None  # of a classification head

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        cuda = get_device_name() == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.adapters: Adapters | None = None
        self.optimizer: Any = None  # with its schedule, unless the engine only runs forward
        self.lr_scheduler: Any = None
        refuse(model_config, engine_config)
        if engine_config.full_determinism:
            enable_full_determinism(seed=engine_config.seed)
        world, sequence = dist.get_world_size(), engine_config.ulysses_sequence_parallel_size
        shards = engine_config.fsdp_size if 0 < engine_config.fsdp_size < world else world
        experts = getattr(engine_config, "expert_parallel_size", 1)
        if shards % sequence or world % shards:
            raise ConfigError(
                f"fsdp_size={shards} must divide {world} processes, and ulysses_sequence_parallel_size="
                f"{sequence} must divide it"
            )
        self.dims = ParallelDims(world // shards, shards // sequence, sequence, experts)
        sizes = {"dp": world // sequence, "sp": sequence}
        self.rows = init_device_mesh(get_device_name(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    # -- the model

    def initialize(self) -> None:
        """Load the model, and make its optimizer and schedule."""
        compute, config = self._compute_dtype(), self.engine_config
        lora = self.model_config.lora_rank > 0
        level = getattr(config, "activation_memory", None)
        if level is None:
            level = "checkpoint" if self.model_config.enable_gradient_checkpointing else "lean"
        # Frozen weights are used only in the dtype of computation.
        frozen = lora or config.forward_only
        options: dict[str, Any] = {
            "dtype": compute if frozen else PrecisionType.to_dtype(config.model_dtype or "fp32"),
            "activation_memory": level,
            "labels": self.labels,
        }
        path = self.model_config.local_path
        if lora:
            options |= {"device": get_device_name(), "projections": "split"}
            self.module = liger_models.from_hub(path, **options)
            settings = LoraSettings(
                self.model_config.lora_rank,
                self.model_config.lora_alpha,
                targets_of(self.model_config.target_modules),
            )
            self.adapters = Adapters(self.module, settings, path, config.seed)
            if self.model_config.lora_adapter_path is not None:
                self.adapters.read(Path(self.model_config.lora_adapter_path))
        else:
            shard = partial(
                parallelize,
                mesh=self.dims,
                compute_dtype=None if options["dtype"] == compute else compute,
                reshard_after_forward=config.reshard_after_forward,
            )
            self.module = liger_models.from_hub(path, shard=shard, **options)
        if not config.forward_only:
            trained = [p for p in self.module.parameters() if p.requires_grad]
            self.optimizer = build_optimizer(trained, self.optimizer_config)
            self.lr_scheduler = schedule_of(self.optimizer, self.optimizer_config)
        self.checkpoints = BaseCheckpointManager(
            self.module,
            self.optimizer,
            lr_scheduler=self.lr_scheduler,
            processing_class=self.model_config.get_processor(),
            checkpoint_config=self.checkpoint_config,
        )
        self._offload()

    @property
    def _replay(self) -> str:
        return "disabled" if self.engine_config.forward_only else self.engine_config.router_replay.mode

    def _compute_dtype(self) -> torch.dtype:
        mixed = self.engine_config.mixed_precision or {}
        return PrecisionType.to_dtype(mixed.get("param_dtype", "bf16"))

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.engine_config.optimizer_offload

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        return _Mode(self, "eval", **kwargs)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """A context in which the policy is its own reference."""
        return nullcontext() if self.adapters is None else without_adapters(self.module)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parameters with their gradients, and the optimizer's state, between host and device."""
        super().to(device, model=model, optimizer=optimizer, grad=grad)
        if model:
            for part in self.module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
            self.module.to(device)
        if optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim():  # not the number of steps
                        state[name] = value.to(device, non_blocking=True)

    # -- processes

    def get_data_parallel_rank(self) -> int:
        return self.rows["dp"].get_local_rank()

    def get_data_parallel_size(self) -> int:
        return self.rows["dp"].size()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.rows["dp"].get_group()

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.rows["sp"].get_local_rank() == 0

    # -- steps

    def forward_backward_batch(
        self, data: Any, loss_function: Callable | None, forward_only: bool = False
    ) -> Any:
        """Run a batch of jagged sequences in micro-batches, and sum gradients unless `forward_only`."""
        group = self.get_data_parallel_group()
        count = data["loss_mask"].sum().to(self.device)
        dist.all_reduce(count, group=group)
        tu.assign_non_tensor(
            data,
            sp_size=self.dims.sequence,
            batch_num_tokens=count.item(),
            dp_size=self.get_data_parallel_size(),
        )
        kept = forward_only or tu.get_non_tensor_data(data, "return_model_output", default=False)
        batches, indices = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        outputs = []
        for number, batch in enumerate(batches):
            with torch.set_grad_enabled(not forward_only), self._summing(number == len(batches) - 1):
                loss, output = self._run(batch.to(self.device), loss_function, forward_only)
                if not forward_only:
                    loss.backward()
            outputs.append(output if kept else {k: v for k, v in output.items() if k != "model_output"})
        if not forward_only and self.adapters is not None:
            self._average_gradients()
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    @contextmanager
    def _summing(self, last: bool) -> Iterator[None]:
        """Exchange gradients only in a step's last micro-batch, if verl's setting says so."""
        defer = self.engine_config.use_no_sync_for_gradient_accumulation and not last
        if not defer or not isinstance(self.module, FSDPModule):
            yield
            return
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def _average_gradients(self) -> None:
        """Average the gradients of adapters, which every process has whole."""
        for p in self.module.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    def _run(self, batch: Any, loss_function: Callable | None, forward_only: bool) -> tuple[Tensor, dict]:
        if len(tu.get(batch, "multi_modal_inputs", default=[])):
            raise UnsupportedModelError(
                "verl's engine of liger_models takes no images yet; use strategy=fsdp2"
            )
        found = self._outputs(batch, forward_only)
        if loss_function is None:
            assert forward_only, "a training step needs a loss function"
            loss, metrics = torch.ones((), device=self.device), {}
        else:
            dp_group = self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=found, data=batch, dp_group=dp_group)
        return loss, {"model_output": detach_tree(found), "loss": loss.detach().item(), "metrics": metrics}

    def _outputs(self, batch: Any, forward_only: bool) -> dict[str, Tensor]:
        """Log-probabilities and the other requested outputs, jagged like input_ids: position t scores token
        t + 1.
        """
        asked = {
            name: tu.get_non_tensor_data(batch, name, default=False)
            for name in ("calculate_entropy", "calculate_sum_pi_squared", "distillation_use_topk")
        }
        if asked["distillation_use_topk"]:
            raise UnsupportedModelError(
                "distillation from a teacher's top tokens is not supported; use fsdp2"
            )
        ids = batch["input_ids"]
        tokens, bounds = ids.values(), ids.offsets()
        labels = tokens.roll(-1).index_fill(0, bounds[1:] - 1, -100)  # nothing follows a last token
        temperature = batch["temperature"]
        if isinstance(temperature, Tensor):
            temperature = temperature.float().to(tokens.device).repeat_interleave(bounds.diff())[None]
        scores = self.module.score(
            tokens[None],
            shift_labels=labels[None],
            cu_seqlens=bounds,
            temperature=temperature,
            entropy=asked["calculate_entropy"],
            log_sum_sq_probs=asked["calculate_sum_pi_squared"],
            **routing_of(batch, self._replay, forward_only),
        )
        log_squares = scores.log_sum_sq_probs
        found = {
            "log_probs": scores.log_probs,
            "entropy": scores.entropy,
            "sum_pi_squared": None if log_squares is None else log_squares.exp(),
            "routed_experts": scores.routed_experts,
        }
        return {name: _jagged(values, bounds) for name, values in found.items() if values is not None}

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """Clip gradients and take a step, unless their norm is not finite. Returns the norm."""
        trained = (p for p in self.module.parameters() if p.requires_grad)
        norm = clip_grad_norm_(trained, self.optimizer_config.clip_grad).item()
        if norm - norm == 0.0:  # finite
            self.optimizer.step()
        else:
            print(f"the gradients' norm is {norm}: this step is skipped")
            self.optimizer.zero_grad()
        return norm

    def lr_scheduler_step(self) -> float:
        self.lr_scheduler.step()
        return self.lr_scheduler.get_last_lr()[0]

    # -- weights

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict | None]:
        """Stream the weights for the rollout, in the dtype of computation; all processes iterate together.

        With adapters that are not merged (verl's `model.lora.merge`) these are only the adapters, or before
        the first of them (`base_sync_done=False`) the weights below them, under vLLM's names for those.
        """
        options: dict[str, Any] = {"dtype": self._compute_dtype()}
        if self.adapters is None or self.model_config.lora.get("merge", False):
            return iter(stream_weights(self.module, names="vllm", **options)), None
        from peft import TaskType

        config = self.adapters.config
        about = config.to_dict() | {"task_type": TaskType(config.task_type)}
        if base_sync_done:
            return iter(stream_weights(self.module, adapter="alone", **options)), about
        return self._below_adapters(config, options), about

    def _below_adapters(self, config: Any, options: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        with without_adapters(self.module):
            for name, tensor in stream_weights(self.module, names="vllm", **options):
                yield replace_lora_wrapper(name, config), tensor

    # -- checkpoints

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write what verl's configuration lists to a folder that all processes share."""
        self.to(get_device_name(), optimizer=self.checkpoints.should_save_optimizer)
        save(self, Path(local_path), max_ckpt_to_keep)
        self._offload()

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **kwargs: Any,
    ) -> None:
        """Read a checkpoint of `save_checkpoint`, of any number of processes."""
        if local_path is not None:
            self.to(get_device_name(), optimizer=self.checkpoints.should_load_optimizer)
            load(self, Path(local_path))
            self._offload()

    def _offload(self) -> None:
        model, optimizer = self.is_param_offload_enabled, self.is_optimizer_offload_enabled
        self.to("cpu", model=model, optimizer=optimizer, grad=model)


@EngineRegistry.register("value_model", backend="liger", device=["cuda", "cpu"])
class LigerValueEngine(LigerEngine):
    """Engine of a critic: a classifier with one label, whose head starts at random."""

    labels = 1

    def _outputs(self, batch: Any, forward_only: bool) -> dict[str, Tensor]:
        ids = batch["input_ids"]
        values = self.module(ids.values()[None], cu_seqlens=ids.offsets(), every_token=True).logits[..., 0]
        return {"values": _jagged(values, ids.offsets())}


class _Mode(BaseEngineCtx):
    """The context of verl's `train_mode` and `eval_mode`, which moves what is offloaded."""

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)


def _jagged(values: Tensor, bounds: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values[0], bounds)
