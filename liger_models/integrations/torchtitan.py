"""Our models in torchtitan's trainer (0.3), by `--module liger_models.integrations.torchtitan`.

    torchrun --nproc-per-node=8 -m torchtitan.train --module liger_models.integrations.torchtitan \
        --config train --hf_assets_path ./Llama-3.1-8B --checkpoint.enable --checkpoint.initial_load_in_hf

The config.json in `hf_assets_path` describes the model. Data, optimizer, schedule, clipping, metrics and
checkpoints are torchtitan's; layers, loss and FSDP2 (`parallelize`) are ours. Logits do not exist in
training: labels go into the model, which returns the sum of the tokens' losses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import BaseLoss, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.trainer import Trainer

import liger_models
from liger_models.convert.checkpoints.expressions import Ref
from liger_models.convert.checkpoints.reading import CheckpointReader, load_parameters
from liger_models.convert.checkpoints.shards import is_sharded
from liger_models.convert.checkpoints.weight_map import connected
from liger_models.convert.checkpoints.writer import Writer
from liger_models.convert.errors import CheckpointError, ConfigError, UnsupportedModelError
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.models.matching import find_layout
from liger_models.parallel.dims import ParallelDims
from liger_models.parallel.sharding import parallelize
from liger_models.training.observing.flops import StepFlops

PREFIX = "model."  # of our names in torchtitan's state


class LigerModel(BaseModel):
    """A model of ours as torchtitan's trainer calls it.

    Projections are split, so that most of its tensors are those of the checkpoint.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """
        Attributes:
            hf_config: contents of a config.json. Default: the one in `hf_assets_path`.
            weights: folder of a checkpoint that the model is read from, each process its own part; for models
                that torchtitan cannot load from Hugging Face's files itself.
            activation_memory: level of activation memory; `FullAC` of torchtitan is "checkpoint" instead.
        """

        hf_config: dict[str, Any] | None = None
        weights: str | None = None
        activation_memory: str = "lean"

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            _refuse(config)
            if self.hf_config is None:
                self.hf_config = liger_models.from_config(
                    config.hf_assets_path, device="meta"
                ).config.to_dict()

        def skeleton(self, dtype: torch.dtype | str = "auto") -> LigerCausalLM:
            """The model without memory."""
            if self.hf_config is None:
                raise ConfigError("hf_config is None; pass the contents of a config.json")
            options: dict[str, Any] = {"activation_memory": self.activation_memory, "projections": "split"}
            return liger_models.from_config(self.hf_config, device="meta", dtype=dtype, **options)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Number of parameters, and operations per token of a row that is one document."""
            step = StepFlops(model.model).of(torch.tensor([seq_len]), seq_len)  # type: ignore[arg-type]
            return sum(p.numel() for p in model.parameters()), step // seq_len

    def __init__(self, config: Config):
        super().__init__()
        self.weights = config.weights
        self.model = config.skeleton(torch.get_default_dtype())

    def verify_module_protocol(self) -> None:
        """Our layers are modules of torch, and need no protocol."""

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Fill the parameters: from `weights`, or at random."""
        if self.weights is None:
            self.model.reset_parameters()
            return
        with CheckpointReader(Path(self.weights)) as reader:
            find_layout(self.model, reader, ())
            load_parameters(self.model.saved_tensors(), self.model.weight_map(), reader)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        labels: Tensor | None = None,
        attention_masks: None = None,
    ) -> Tensor:
        """Compute logits [batch, seq, V]; with labels (already shifted) the sum of their losses.

        Args:
            tokens: [batch, seq] ids.
            positions: [batch, seq]; each document of a row begins at 0.
            labels: [batch, seq]; -100 does not count.
            attention_masks: must be None: documents follow from positions.
        """
        if attention_masks is not None:
            raise UnsupportedModelError("attention_masks were given; documents are known by their positions")
        if labels is None:
            return self.model(tokens, position_ids=positions).logits
        # The trainer divides by the number of labels of the whole step.
        return self.model(tokens, position_ids=positions, shift_labels=labels, num_items_in_batch=1).loss


def _refuse(config: Any) -> None:
    sizes = config.parallelism
    for name in ("tensor", "context", "pipeline", "expert"):
        degree = getattr(sizes, f"{name}_parallel_degree")
        if degree != 1:
            raise ConfigError(
                f"parallelism.{name}_parallel_degree is {degree}; expected 1: in torchtitan our models "
                "are only sharded and replicated over data parallel processes"
            )
    if config.compile.enable and "model" in config.compile.components:
        raise ConfigError("compile.enable is True for the model, whose layers are fused kernels; disable it")
    if not config.training.disable_cuda_graphs:
        raise ConfigError("CUDA graphs of whole steps are not supported; set training.disable_cuda_graphs")
    if config.training.enable_cpu_offload:
        raise ConfigError("training.enable_cpu_offload is not supported; disable it")
    if config.debug.spmd_typechecking:
        raise ConfigError("debug.spmd_typechecking knows no types of our kernels; disable it")


def parallelize_liger(
    model: LigerModel, *, parallel_dims: Any, training: Any, parallelism: Any, ac_config: Any, **others: Any
) -> LigerModel:
    """Shard a model over data parallel processes with `parallelize`, as torchtitan's `parallelize_fn`."""
    if isinstance(ac_config, FullAC.Config):
        model.model.set_activation_memory("checkpoint")
    elif not isinstance(ac_config, SelectiveAC.Config):
        raise ConfigError(
            f"activation_checkpoint is {type(ac_config).__qualname__}; expected FullAC, or SelectiveAC for "
            "the model's own activation_memory"
        )
    compute = TORCH_DTYPE_MAP[training.mixed_precision_param]
    parallelize(
        model.model,
        ParallelDims(parallel_dims.dp_replicate, parallel_dims.dp_shard),
        compute_dtype=None if compute == model.model.dtype else compute,
        reshard_after_forward=parallelism.fsdp_reshard_after_forward != "never",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):  # sums, not means: losses are divided by the labels of all ranks
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


class LigerLoss(CrossEntropyLoss):
    """The loss that the model has summed; of logits, as in validation, their cross entropy."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        pass

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if pred.dim():
            return super().__call__(pred, labels, global_valid_tokens, **kwargs)
        return pred if global_valid_tokens is None else pred / global_valid_tokens, {}


class LigerTrainer(Trainer):
    """torchtitan's trainer, which also gives the labels to the model."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        loss: BaseLoss.Config = field(default_factory=LigerLoss.Config)

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        inputs, labels, extra = super().post_dataloading_process(input_dict, labels)
        return inputs, labels, {**extra, "labels": labels}


class LigerStateDictAdapter(StateDictAdapter):
    """Conversion between torchtitan's state of a LigerModel and the tensors of its Hugging Face checkpoint.

    Sharded tensors keep their shards, and must be tensors of the checkpoint as they are: those that several
    ones are made of (stacks of experts, packed projections) cannot be cut without gathering them.
    """

    def __init__(self, model_config: LigerModel.Config, hf_assets_path: str | None):
        super().__init__(model_config, hf_assets_path)
        model = model_config.skeleton()
        self.weight_map = model.weight_map()
        first: dict[int, str] = {}
        every = model.named_parameters(remove_duplicate=False)
        self.tied = {name: first.setdefault(id(p), name) for name, p in every}
        self.tied = {name: original for name, original in self.tied.items() if name != original}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint's tensors by name: views of the model's where strides allow.

        Raises:
            CheckpointError: other tensors than the model's, or sharded ones that are not the checkpoint's.
        """
        natives = {name.removeprefix(PREFIX): tensor for name, tensor in state_dict.items()}
        natives = {name: tensor for name, tensor in natives.items() if name not in self.tied}
        _check_names("the state", natives, self.weight_map)
        found: dict[str, Any] = {}
        for group in connected(self.weight_map):
            tensors = [natives[name] for name in group]
            (name, expr), *_ = group.items()
            if isinstance(expr, Ref):
                found[expr.name] = tensors[0]
            elif any(map(is_sharded, tensors)):
                raise CheckpointError(
                    f"{name} is sharded, and holds {len({*expr.refs()})} tensors of the checkpoint, or one "
                    "in another order. Read weights with the model's `weights=FOLDER` instead, save in "
                    "torchtitan's own format, and convert it with liger_models.integrations.torchtitan.export"
                )
            else:
                found |= Writer(group)([tensor.detach() for tensor in tensors])
        return found

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """torchtitan's state from the checkpoint's tensors.

        Raises:
            CheckpointError: other tensors than the checkpoint's.
        """
        expected = {ref.name for expr in self.weight_map.values() for ref in expr.refs()}
        _check_names("the checkpoint", hf_state_dict, expected)
        natives = {
            name: hf_state_dict[expr.name] if isinstance(expr, Ref) else expr.read(hf_state_dict.__getitem__)
            for name, expr in self.weight_map.items()
        }
        natives |= {name: natives[original] for name, original in self.tied.items()}
        return {PREFIX + name: tensor for name, tensor in natives.items()}


def _check_names(where: str, found: Iterable[str], expected: Iterable[str]) -> None:
    missing, unknown = sorted({*expected} - {*found}), sorted({*found} - {*expected})
    if missing or unknown:
        raise CheckpointError(
            f"{where} lacks {len(missing)} tensors {missing[:3]} and has {len(unknown)} unknown ones "
            f"{unknown[:3]}; expected those of the model"
        )


def model_spec(**settings: Any) -> ModelSpec:
    """torchtitan's description of a model.

    Args:
        settings: fields of `LigerModel.Config`.
    """
    return ModelSpec(
        name="liger_models",
        flavor="hf_assets",
        model=LigerModel.Config(**settings),
        parallelize_fn=parallelize_liger,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=LigerStateDictAdapter,
    )


def export(checkpoint: str | Path, hf_assets_path: str | Path, output: str | Path) -> None:
    """Write a checkpoint of torchtitan's own format as files of Hugging Face, in one process on the CPU.

    Args:
        checkpoint: folder of a step, such as outputs/checkpoint/step-1000.
        hf_assets_path: checkpoint of Hugging Face that the model was made from. Names, dtypes, config and
            tokenizer are as there.
        output: folder to write.
    """
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "projections": "split"}
    model = liger_models.from_hub(hf_assets_path, **options)
    state = {PREFIX + name: tensor.detach() for name, tensor in model.saved_tensors().items()}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    model.save_pretrained(output)


def train() -> Trainer.Config:
    """Configuration of a run: the model of `--hf_assets_path`, and torchtitan's defaults, which its command
    line changes.
    """
    return LigerTrainer.Config(
        model_spec=model_spec(),
        optimizer=default_adamw(lr=1e-5),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, disable_cuda_graphs=True),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        checkpoint=CheckpointManager.Config(),
    )
