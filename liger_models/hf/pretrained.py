"""What all our models in transformers have in common: what its base class has, on our parts.

    checkpoints         names and layouts, its loader and writer, projections fused or split
    parameters          fresh values, resized embeddings
    activation memory   checkpointing.py
    adapters            what PEFT has put in, and transformers' own loading of adapters

The models themselves are in models.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from liger_models.hf.checkpoints.merged import merged_tensors
from liger_models.hf.checkpoints.module_names import refuse_ambiguous
from liger_models.hf.checkpoints.quantization import give_layers_to_quantise, is_quantised
from liger_models.hf.checkpoints.unread import leave_unread, unread_in
from liger_models.hf.checkpoints.weights import (
    CheckpointConverter,
    Groups,
    as_checkpoint,
    convert_state_dict,
    groups_of,
    refuse_lost_adapters,
)
from liger_models.layers.model.decoder import Decoder
from liger_models.layers.parts.embedding import TokenEmbedding
from liger_models.layers.projections.packed_linear import (
    fuse_projections,
    split_projections,
    weight_map_of_parts,
)


class LigerPreTrainedModel(CheckpointingSwitches, PreTrainedModel):
    """What the models below have in common.

    Attributes:
        architecture: the family, as registered.
        projections: whether projections are packed ("fused") or layers of their own ("split") when a model
            is made.
        layouts: the forms that the family's checkpoints have; once one was read, those that it can be.
    """

    architecture: Architecture
    projections: str = "fused"
    layouts: tuple[Layout, ...]
    model_at_the_top: bool = False  # the decoder's modules are not within one that is called `model`

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _skip_keys_device_placement = {"past_key_values"}  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = False

    def _begin(self) -> None:
        """What follows once the parts of a model are there."""
        self.layouts = self.architecture.layouts
        self._no_split_modules = self.base_decoder.kinds_of_layers()
        self._is_stateful = self.base_decoder.spec.is_recurrent
        self.register_load_state_dict_pre_hook(convert_state_dict)
        self.register_load_state_dict_pre_hook(refuse_lost_adapters)
        if is_quantised(self.config):
            give_layers_to_quantise(self)
        entries = self._conversions(groups_of(self))
        register_checkpoint_conversion_mapping(type(self).__name__, entries, overwrite=True)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """transformers' own.

        Raises:
            ValueError: transformers is asked to divide the model while it loads, by plans that it has for its
                own modules alone.
        """
        asked = [name for name in _DIVIDED_LOADING if kwargs.get(name) is not None]
        if asked:
            raise ValueError(
                f"{', '.join(asked)}: transformers' plans for dividing a model as it loads are for its own "
                "modules. Load it whole and let accelerate, Trainer or torch's fully_shard divide it, or "
                "read the rows of each process alone: liger_models.from_hub(..., shard=...)"
            )
        loaded = super().from_pretrained(*args, **kwargs)
        leave_unread((loaded[0] if isinstance(loaded, tuple) else loaded).base_decoder)
        return loaded

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' own, which reads state dicts of checkpoints alone. `model.state_dict()` may have
        other shapes under the same names (gpt-oss).
        """
        if state_dict is not None:
            state_dict = as_checkpoint(model, state_dict)
        return PreTrainedModel._load_pretrained_model(model, state_dict, *args, **kwargs)

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """A config from which transformers' own model was made says how that runs its experts; ours run in
        one way.
        """
        return (
            "eager"
            if requested_experts == "grouped_mm"
            else super().get_correct_experts_implementation(requested_experts)
        )

    @property
    def base_decoder(self) -> Any:
        """Embeddings, blocks and norm: the base model, or this one if it is that. (`decoder` would be what
        transformers' `get_decoder` looks for.)
        """
        return self.base_model

    # -- checkpoints

    def weight_map(self, layout: Layout | None = None) -> dict[str, Expr]:
        """The saved tensors of the decoder as expressions over a checkpoint's.

        Args:
            layout: of the checkpoint. Default: that of the one that was read, or the family's usual one.
        """
        layout = layout or self.layouts[0]
        decoder = self.base_decoder
        prefix = f"{self.base_model_prefix}."
        if decoder is self:
            layout = _OfBase(**vars(layout), base=prefix)
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
        """Of the forms that a checkpoint can have, those that a tensor of it was found to have."""
        self.layouts = tuple(layout for layout in self.layouts if layout in layouts) or self.layouts

    @property
    def _weight_conversions(self) -> list[WeightConverter | WeightRenaming]:
        """What transformers' writer turns round: made from the modules as they are now."""
        if self.base_decoder is self and self.base_decoder.vision is not None:
            layout: Any = self.base_decoder.own_layout
            return self._conversions(
                Groups([(layout, self.weight_map(layout))], f"{self.base_model_prefix}.")
            )
        return self._conversions(groups_of(self).in_layout(self.layouts[0]))

    @_weight_conversions.setter
    def _weight_conversions(self, used: object) -> None:
        """The loader notes here what it used; the layouts that were read are noted already."""

    def _conversions(self, groups: Groups) -> list[WeightConverter | WeightRenaming]:
        """The entries of transformers' mapping. Quantised layers are in none, for they are those of the
        checkpoint.
        """
        return [CheckpointConverter(type(self).__name__, groups)]

    def split_projections(self) -> None:
        """Give query, key, value, gate and up layers of their own, with the usual names, as PEFT and
        bitsandbytes look for them: `ModelParameters.split_projections`.
        """
        split_projections(self, self.weight_map())

    def fuse_projections(self) -> None:
        """Turn `split_projections` back."""
        fuse_projections(self)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The (name, tensor) of the checkpoint that `save_pretrained` would write, one after the other, for
        whoever takes weights without files, such as an engine that generates with the model as it trains.

        Adapters of PEFT that are active are merged into what is given; the model stays as it is. Tensors are
        else views of the model's where strides can say so, in its dtypes and on its devices. Of a model that
        is sharded over processes all of them must run through it together: one tensor at a time is gathered.

        Raises:
            CheckpointError: the model is quantised, or has other tensors than it was made with.
        """
        found, tied = merged_tensors(self), getattr(self, "all_tied_weights_keys", None) or {}
        known = {name: e for name, e in self.weight_map().items() if name in found or name not in tied}
        if missing := sorted(known.keys() - found.keys()):
            raise CheckpointError(
                f"the model has no {missing[0]} ({len(missing)} such tensors), so it is not what it was made "
                "as: remove parametrizations, and unload what is no adapter of PEFT"
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
        """transformers' own, with config.json as transformers' own model writes it: `architectures` names
        that, for whoever loads the checkpoint without us.

        Of a model that is sharded over processes all of them must call this; the first one collects the
        tensors on the host, one at a time, and writes.
        """
        writes = is_main_process and (not dist.is_initialized() or dist.get_rank() == 0)
        sharded = any(is_sharded(p) or is_zero3(p) for p in self.parameters())
        if is_main_process and state_dict is None and sharded:
            tensors = self.checkpoint_tensors()
            state_dict = {name: tensor.cpu() for name, tensor in tensors if writes}
            kwargs["save_original_format"] = False
        if not writes:  # and may have nothing that could be converted
            kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        path = Path(save_directory) / "config.json"
        self.config.architectures = [self._get_name()]
        if writes and path.exists():
            written = json.loads(path.read_text(encoding="utf-8"))
            written["architectures"] = self.config.architectures
            path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if push_to_hub:
            options = {key: kwargs[key] for key in ("commit_message", "token", "create_pr") if key in kwargs}
            self.push_to_hub(kwargs.get("repo_id", Path(save_directory).name), **options)

    def _get_name(self) -> str:
        # Trainer looks here for a causal language model, whose labels are shifted under label smoothing too.
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

    def set_input_embeddings(self, value: Any) -> None:
        """A plain embedding, as resizing makes it, becomes one of ours: it keeps the family's scale."""
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
                spec = replace(spec, vocab_size=value.num_embeddings, extra_ids=0)
        if type(value) is nn.Embedding:
            with torch.device("meta"):
                ours = TokenEmbedding(spec.num_ids, spec.hidden_size, spec.embed_scale, spec.padding_idx)
            ours.weight = value.weight
            keep_initialized(value, ours)
            value = ours
        decoder.embed_tokens, decoder.spec = value, spec
        decoder.note_forms()

    def freeze(self, *parts: str) -> None:
        """`layers.Decoder.freeze`: train the other parts alone, of "vision", "projector" and "language"."""
        Decoder.freeze(self.base_decoder, *parts)
        leave_unread(self.base_decoder)
        head = self.get_output_embeddings()
        if self.base_decoder is not self and head is not None:
            head.requires_grad_("language" not in parts)

    # -- adapters, and what others put into the model

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            _refuse_patch(value)
        super().__setattr__(name, value)
        if name == "peft_config":  # PEFT's last word when it has put adapters into the model
            from liger_models.hf.adapters.expert_adapters import warn_of_layers_left_out

            self._meet_adapters()
            warn_of_layers_left_out(self)

    def get_submodule(self, target: str) -> nn.Module:
        """As of any module. PEFT asks for this name where it puts learned prompts in front of a model, and
        tells it in no other way.

        Raises:
            ValueError: a part of a packed projection that has an adapter.
        """
        if target == "embeddings.word_embeddings":
            self._prompted = True
        path, _, part = target.rpartition(".")
        base = getattr(super().get_submodule(path), "base_layer", None) if path else None
        if part in getattr(base, "parts", ()):
            raise ValueError(
                f"{path} is to have an adapter, and so is {part}, which is packed in it; call "
                "model.split_projections() first, and name the parts"
            )
        return super().get_submodule(target)

    def _meet_adapters(self) -> None:
        from liger_models.hf.adapters.expert_adapters import keep_usual_order
        from liger_models.hf.adapters.lora import take_over

        take_over(self)
        keep_usual_order(self)
        refuse_ambiguous(self.base_decoder)

    def load_adapter(
        self, peft_model_id: Any = None, adapter_name: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """transformers' own, which fills parameters as they are in files.

        Raises:
            CheckpointError: a tensor of the adapter has no place here.
        """
        from liger_models.hf.adapters.expert_adapters import take_usual_order

        loaded = super().load_adapter(peft_model_id, adapter_name, *args, **kwargs)
        if wrong := sorted({*loaded.unexpected_keys, *loaded.missing_keys}):
            raise CheckpointError(
                f"{peft_model_id}: the adapter and the model differ in {wrong[:4]}; make the model as it was "
                "when the adapter was trained (projections split or not), or use liger_models.hf.load_adapter"
            )
        take_usual_order(self, adapter_name or "default")
        return loaded

    def train(self, mode: bool = True) -> Self:
        """As of any module. Trainers call it in front of every step, so that what has been put into layers
        since is found here.
        """
        for module in self.modules():
            _refuse_patch(vars(module).get("forward"))
        if mode and getattr(self, "peft_config", None):  # adapters that were added later, in other layers
            self._meet_adapters()
        return super().train(mode)


def keep_initialized(module: nn.Module, ours: nn.Module) -> None:
    """Mark a module that replaces another as initialised if that was: `post_init` then passes over it."""
    ours._is_hf_initialized = getattr(module, "_is_hf_initialized", False)  # type: ignore[assignment]


@dataclass(frozen=True)
class _OfBase(Layout):
    """A layout of a model without a head, whose tensors have no name of the base model before their own."""

    base: str = ""

    def name(self, canonical: str) -> str:
        return super().name(canonical).removeprefix(self.base)


_DIVIDED_LOADING = ("distributed_config", "tp_plan", "tp_size", "device_mesh")


def _refuse_patch(forward: Any) -> None:
    home = getattr(getattr(forward, "__func__", forward), "__module__", None) or ""
    if home.startswith("liger_kernel"):
        raise TypeError(
            "use_liger_kernel=True would put liger-kernel's patches into a model of liger_models, which "
            "is built from fused kernels already and has other modules; leave the option out"
        )
