"""Common base of our transformers models: the `PreTrainedModel` interface implemented with our layers.

    checkpoints         names and layouts, its loader and writer, projections fused or split
    parameters          fresh values, resized embeddings
    activation memory   checkpointing.py
    adapters            PEFT's layers, and transformers' own loading of adapters

The models themselves are in models.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from liger_models.architectures import Architecture
from liger_models.convert.checkpoints.expressions import Expr, Ref
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.shards import checkpoint_tensors, is_sharded, is_zero3, shape_of
from liger_models.convert.errors import CheckpointError
from liger_models.hf.checkpointing import CheckpointingSwitches
from liger_models.hf.checkpoints.dense import dense_tensors, with_dense_config
from liger_models.hf.checkpoints.dtypes import DtypesOfTransformers
from liger_models.hf.checkpoints.merged import merged_tensors
from liger_models.hf.checkpoints.module_names import by_path, refuse_ambiguous, to_split
from liger_models.hf.checkpoints.quantization import (
    QUANTISED_ROUTERS,
    give_layers_to_quantise,
    is_quantised,
    refuse_quantised_routers,
)
from liger_models.hf.checkpoints.renaming import CheckpointRenaming
from liger_models.hf.checkpoints.unread import leave_unread, unread_in
from liger_models.hf.checkpoints.weights import (
    CheckpointConverter,
    Groups,
    as_checkpoint,
    convert_state_dict,
    groups_of,
    refuse_lost_adapters,
)
from liger_models.layers.model.freezing import freeze
from liger_models.layers.parts.embedding import TokenEmbedding
from liger_models.layers.parts.fresh_weights import draw_fresh
from liger_models.layers.projections.packed_linear import (
    fuse_projections,
    split_projections,
    weight_map_of_parts,
)


class LigerPreTrainedModel(CheckpointingSwitches, DtypesOfTransformers, PreTrainedModel):
    """Base class of our transformers models.

    Attributes:
        architecture: the family, as registered.
        projections: whether a new model packs its projections ("fused") or keeps them separate ("split").
        layouts: the family's checkpoint layouts; after a checkpoint was read, those that match it.
    """

    architecture: Architecture
    projections: str = "fused"
    layouts: tuple[Layout, ...]
    model_at_the_top: bool = False  # whether the decoder's modules are not nested in a module named `model`

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _skip_keys_device_placement = {"past_key_values", "cache"}  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = False

    def _begin(self) -> None:
        """Finish construction once the submodules exist."""
        self.layouts = self.architecture.layouts
        # Where one of transformers' layers is several of ours, a module there holds parameters of both.
        apart = self.base_decoder.own_layout.in_one == 1
        self._no_split_modules = self.base_decoder.layer_class_names() if apart else set()
        self._is_stateful = self.base_decoder.spec.is_recurrent
        self.register_load_state_dict_pre_hook(convert_state_dict)
        self.register_load_state_dict_pre_hook(refuse_lost_adapters)
        if is_quantised(self.config):
            give_layers_to_quantise(self)
        entries = self._conversions(groups_of(self))
        register_checkpoint_conversion_mapping(type(self).__name__, entries, overwrite=True)
        if (inner := self.base_decoder) is not self:
            # The loader applies the entries of both classes in turn, and would rename a tensor twice.
            entries = inner._conversions(groups_of(inner))[-1:]
            register_checkpoint_conversion_mapping(type(inner).__name__, entries, overwrite=True)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint with transformers' own loader.

        Raises:
            ValueError: a tensor-parallel plan is requested; transformers' plans fit only its own modules.
        """
        asked = [name for name in _DIVIDED_LOADING if kwargs.get(name) is not None]
        if asked:
            raise ValueError(
                f"{', '.join(asked)}: transformers' plans for dividing a model as it loads are for its own "
                "modules. Load it whole and let accelerate, Trainer or torch's fully_shard divide it, or "
                "read the rows of each process alone: liger_models.from_hub(..., shard=...)"
            )
        try:
            loaded = super().from_pretrained(*args, **with_dense_config(cls.config_class, args, kwargs))
        except RuntimeError as error:
            if "ignore_mismatched_sizes" in str(error) or "conversion of the weights" in str(error):
                error.add_note(f"If these are routers: {QUANTISED_ROUTERS}")
            raise
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if is_quantised(model.config):
            refuse_quantised_routers(model)
        leave_unread(model)
        return loaded

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Convert a given state dict to checkpoint form, the only one that transformers' loader reads.
        `model.state_dict()` may have other shapes under the same names (gpt-oss).
        """
        if state_dict is not None:
            state_dict = as_checkpoint(model, state_dict)
        with dense_tensors(model, checkpoint_files if state_dict is None else None) as dense:
            tensors = state_dict if dense is None else dense
            return PreTrainedModel._load_pretrained_model(model, tensors, checkpoint_files, *args, **kwargs)

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Ignore the experts implementation that transformers stored in a config; ours has only one."""
        return (
            "eager"
            if requested_experts == "grouped_mm"
            else super().get_correct_experts_implementation(requested_experts)
        )

    @property
    def base_decoder(self) -> Any:
        """Embeddings, blocks and norm: the base model, or this model if it is one. Not named `decoder`,
        because transformers' `get_decoder` looks for that name.
        """
        return self.base_model

    # -- checkpoints

    def weight_map(self, layout: Layout | None = None) -> dict[str, Expr]:
        """Map each saved tensor of the decoder to an expression over checkpoint tensors.

        Args:
            layout: of the checkpoint. Default: the layout that was read, or the family's usual one.
        """
        layout = layout or self.layouts[0]
        decoder = self.base_decoder
        prefix = f"{self.base_model_prefix}."
        if decoder is self:
            layout = layout.of_base(prefix)
        expressions = layout.weight_map(decoder.forms).items()
        named, holder = {decoder.names[name]: e for name, e in expressions}, decoder
        if self.model_at_the_top:
            holder = self
        weight_map = weight_map_of_parts(holder, named)
        weight_map |= unread_in(decoder, layout)
        if decoder is self or self.model_at_the_top:
            return weight_map
        return {f"{prefix}{name}": e for name, e in weight_map.items()}

    def note_layouts(self, layouts: Sequence[Layout]) -> None:
        """Narrow the possible layouts to those that match the checkpoint read."""
        self.layouts = tuple(layout for layout in self.layouts if layout in layouts) or self.layouts

    @property
    def _weight_conversions(self) -> list[WeightConverter | WeightRenaming]:
        """Conversions that transformers' writer inverts, built from the current modules."""
        if self.base_decoder is self and self.base_decoder.vision is not None:
            layout: Any = self.base_decoder.own_layout
            return self._conversions(
                Groups([(layout, self.weight_map(layout))], f"{self.base_model_prefix}.")
            )
        return self._conversions(groups_of(self).in_layout(self.layouts[0]))

    @_weight_conversions.setter
    def _weight_conversions(self, used: object) -> None:
        """Ignore the loader's record of conversions; the layouts read are recorded already."""

    def _conversions(self, groups: Groups) -> list[WeightConverter | WeightRenaming]:
        """Entries of transformers' mapping. Quantised layers are at most renamed."""
        name, quantised = type(self).__name__, is_quantised(self.config)
        renaming = [CheckpointRenaming(f"{name} renamed", groups)] if quantised else []
        return [*renaming, CheckpointConverter(name, groups, quantised=quantised)]

    def split_projections(self) -> None:
        """Split packed projections into query, key, value, gate and up layers under the usual names, which
        PEFT and bitsandbytes look for: `ModelParameters.split_projections`, into the layers of `to_split`.
        """
        split_projections(self, to_split(self))

    def fuse_projections(self) -> None:
        """Undo `split_projections`."""
        fuse_projections(self)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the (name, tensor) pairs that `save_pretrained` would write, for consumers that take weights
        without files, such as an inference engine during RL.

        Active PEFT adapters are merged into copies; the model does not change. Other tensors are views of the
        model's where strides allow, in its dtypes and on its devices. If the model is sharded over processes,
        all of them must iterate together; one tensor is gathered at a time.

        Raises:
            CheckpointError: the model is quantised, or its tensors are not those it was made with.
        """
        found, tied = merged_tensors(self), getattr(self, "all_tied_weights_keys", None) or {}
        known = {name: e for name, e in self.weight_map().items() if name in found or name not in tied}
        if missing := sorted(known.keys() - found.keys()):
            raise CheckpointError(
                f"the model has no {missing[0]} ({len(missing)} such tensors), so it was changed after its "
                "creation: remove parametrizations, and unload adapters that are not PEFT's"
            )
        own = {name: Ref(name, shape_of(get())) for name, get in found.items() if name not in known}
        yield from checkpoint_tensors(lambda name: found[name](), known | own)

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[Any, Any] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save as transformers does. `architectures` in config.json names transformers' own class, so that
        the checkpoint loads without this library.

        If the model is sharded over processes, all of them must call this; the first one gathers the tensors
        on the host, one at a time, and writes.
        """
        writes = is_main_process and (not dist.is_initialized() or dist.get_rank() == 0)
        sharded = any(is_sharded(p) or is_zero3(p) for p in self.parameters())
        if is_main_process and state_dict is None and sharded:
            tensors = self.checkpoint_tensors()
            state_dict = {name: tensor.cpu() for name, tensor in tensors if writes}
            kwargs["save_original_format"] = False
        if not writes:  # such a process may have no tensors to convert
            kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        path = Path(save_directory) / "config.json"
        self.config.architectures = [self.own_name]
        if writes and path.exists():
            written = json.loads(path.read_text(encoding="utf-8"))
            written["architectures"] = self.config.architectures
            path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if push_to_hub:
            options = {key: kwargs[key] for key in ("commit_message", "token", "create_pr") if key in kwargs}
            self.push_to_hub(kwargs.get("repo_id", Path(save_directory).name), **options)

    @property
    def own_name(self) -> str:
        return type(self).__name__.removeprefix("FSDP").removeprefix("Liger")

    # -- parameters

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        ours = type(module).__module__.startswith("liger_models.")
        if initialize := self.base_decoder.initializers.get(type(module)):
            initialize(module)
        elif isinstance(module, nn.Linear | nn.Embedding) or not ours:
            super()._init_weights(module)
        elif not isinstance(module, PreTrainedModel) and hasattr(module, "reset_parameters"):
            reset: Any = module.reset_parameters
            reset(getattr(self.config, "initializer_range", None) or 0.02)
        draw_fresh(module)

    def set_input_embeddings(self, value: Any) -> None:
        """Convert a plain embedding, as resizing makes it, to ours, which keeps the family's scale."""
        decoder = self.base_decoder
        spec = decoder.spec
        if isinstance(value, nn.Embedding):
            known = spec.per_layer_vocab_size
            if known is not None and value.num_embeddings > known:
                raise ValueError(
                    f"the layers of this model have inputs of their own for {known} ids, so {known} is the "
                    f"most that its embedding can have; found {value.num_embeddings}"
                )
            if value.num_embeddings != spec.num_ids:
                spec = spec.resized(value.num_embeddings)
        if type(value) is nn.Embedding:
            with torch.device("meta"):
                scale = spec.embed_scale, spec.padding_idx, spec.round_embed_scale, spec.id_norm
                ours = TokenEmbedding(spec.num_ids, spec.hidden_size, *scale)
            ours.weight, ours.embed_norm = value.weight, getattr(decoder.embed_tokens, "embed_norm", None)
            keep_initialized(value, ours)
            value = ours
        decoder.embed_tokens, decoder.spec = value, spec
        decoder.note_forms()

    def freeze(self, *patterns: str, train_only: Sequence[str] = ()) -> None:
        """Freeze parameters by their checkpoint names, or "vision", "projector" and "language", and train all
        others: `layers.CausalLM.freeze`.
        """
        parts, head = self.base_decoder.parts(), self.get_output_embeddings()
        if head is not None:
            parts["language"].append(head)
        freeze(self, self.weight_map(), patterns, train_only, parts=parts)
        leave_unread(self)

    # -- adapters and other injected modules

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            _refuse_patch(value)
        super().__setattr__(name, value)
        if name == "peft_config":  # PEFT sets it last, after it has injected its adapters
            from liger_models.hf.adapters.expert_adapters import warn_of_layers_left_out

            self._meet_adapters()
            warn_of_layers_left_out(self)

    def get_submodule(self, target: str) -> nn.Module:
        """Return the submodule at a path. PEFT calls this when it sets up prompt learning, which is the only
        sign it gives of it.

        Raises:
            ValueError: a part of a packed projection that has an adapter.
        """
        if target == "embeddings.word_embeddings":
            self._prompted = True
        path, _, part = target.rpartition(".")
        base = getattr(self.get_submodule(path), "base_layer", None) if path else None
        if part in getattr(base, "parts", ()):
            raise ValueError(
                f"adapters were requested for {path} and for {part}, which is packed in it; call "
                "model.split_projections() first, and name the parts"
            )
        found = by_path(self, target)
        return super().get_submodule(target) if found is None else found

    def _meet_adapters(self) -> None:
        from liger_models.hf.adapters.expert_adapters import keep_usual_order
        from liger_models.hf.adapters.lora import take_over

        take_over(self)
        keep_usual_order(self)
        refuse_ambiguous(self.base_decoder)

    def load_adapter(
        self, peft_model_id: Any = None, adapter_name: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Load an adapter with transformers' own loader, which copies parameters as files hold them.

        Raises:
            CheckpointError: a tensor of the adapter has no matching parameter.
        """
        from liger_models.hf.adapters.adapters import check_loaded
        from liger_models.hf.adapters.expert_adapters import take_usual_order

        before, name = {path for path, _ in self.named_parameters()}, adapter_name or "default"
        loaded = super().load_adapter(peft_model_id, adapter_name, *args, **kwargs)
        check_loaded(loaded, before, name, str(peft_model_id))
        take_usual_order(self, name)
        return loaded

    def train(self, mode: bool = True) -> Self:
        """Set training mode. Trainers call this before every step, so newly injected adapters are found."""
        for module in self.modules():
            _refuse_patch(vars(module).get("forward"))
        if mode and getattr(self, "peft_config", None):  # adapters that were added later, in other layers
            self._meet_adapters()
        return super().train(mode)


def keep_initialized(module: nn.Module, ours: nn.Module) -> None:
    """Mark a replacement module as initialised if the original was, so that `post_init` skips it."""
    ours._is_hf_initialized = getattr(module, "_is_hf_initialized", False)  # type: ignore[assignment]


_DIVIDED_LOADING = ("distributed_config", "tp_plan", "tp_size", "device_mesh")


def _refuse_patch(forward: Any) -> None:
    home = getattr(getattr(forward, "__func__", forward), "__module__", None) or ""
    if home.startswith("liger_kernel"):
        raise TypeError(
            "use_liger_kernel=True would put liger-kernel's patches into a model of liger_models, which "
            "is built from fused kernels already and has other modules; leave the option out"
        )
