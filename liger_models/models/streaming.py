"""Transfer of weights to an inference engine during training, without files. Names, dtypes and bytes are as
in a checkpoint.

    stream = stream_weights(model, names="vllm", dtype="bfloat16", track=True)
    for name, tensor in stream:                             # or: for bucket in stream.buckets("512MiB")
        engine.load_weights([(name, tensor)])
    ...                                                     # train
    later = stream_weights(model, names="vllm", dtype="bfloat16", since=stream.token)   # what has changed

At most one bucket, and one tensor in addition, exists on top of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_models.convert.checkpoints.adapter import PREFIX
from liger_models.convert.checkpoints.adapter_forms import adapter_layers
from liger_models.convert.checkpoints.expressions import Expr
from liger_models.convert.checkpoints.fingerprint import fingerprints
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.shards import is_sharded, local_tensor, shape_of, whole
from liger_models.convert.checkpoints.weight_map import check_whole, connected
from liger_models.convert.checkpoints.writer import Writer
from liger_models.convert.errors import CheckpointError, ConfigError
from liger_models.convert.sizes import parse_size
from liger_models.models.causal_lm import LigerCausalLM, check_savable, parse_dtype
from liger_models.models.quantised_export import AS_LOADED, encoder_of

Pairs = Iterator[tuple[str, Tensor]]
Entries = Iterator[tuple[str, Tensor, torch.dtype, bool]]
"""Names, values, the dtype in which each is sent, and whether the next value may follow it in one memory."""
_ALIGNMENT = 256  # bytes, between tensors of a bucket: more than any dtype or vector load needs


@dataclass(frozen=True)
class Bucket:
    """Several tensors in one piece of memory, to be sent as one message.

    Attributes:
        buffer: uint8 [bytes].
        tensors: views of it, by name.
    """

    buffer: Tensor
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class WeightToken:
    """The state of a process's weights when a stream began: fingerprints (convert/checkpoints/fingerprint.py)
    by native name, and the settings of the stream.
    """

    prints: Mapping[str, Tensor]
    settings: tuple[object, ...]


class WeightStream:
    """Iterable of a model's (name, tensor) pairs, from `stream_weights`.

    Tensors are views of the model's where dtype and strides allow it: use them before the model trains on.
    """

    def __init__(self, entries: Callable[[], Entries], token: WeightToken | None):
        self._entries, self._token = entries, token

    def __iter__(self) -> Pairs:
        for name, tensor, dtype, _ in self._entries():
            yield name, tensor.to(dtype)

    @property
    def token(self) -> WeightToken:
        """The weights' state when `stream_weights` was called, for the `since` of a later call.

        Raises:
            ConfigError: the stream was made without `track` or `since`.
        """
        if self._token is None:
            raise ConfigError("this stream has no token; pass track=True to stream_weights")
        return self._token

    def buckets(self, size: int | str = "512MiB") -> Iterator[Bucket]:
        """Iterate over buckets of at most `size` bytes (or as text, "512MiB"); a larger tensor gets its own.
        Each is newly allocated: delete one before taking the next, so that only one exists at a time.
        """
        limit = parse_size(size)
        filled, tensors, used, room = None, dict[str, Tensor](), 0, 0
        flat = dict[torch.dtype, Tensor]()  # the bucket's memory as a row of each dtype
        copy = _Copy()
        for name, tensor, dtype, more in self._entries():
            count, width = tensor.numel(), dtype.itemsize
            start = -(-used // _ALIGNMENT) * _ALIGNMENT
            if filled is not None and start + count * width > room:
                copy.run()
                yield Bucket(filled[:used], tensors)
                filled, tensors, start = None, {}, 0
                flat.clear()
            if filled is None:
                room = max(limit, count * width)
                filled = torch.empty(room, dtype=torch.uint8, device=tensor.device)
            if dtype not in flat:
                flat[dtype] = filled[: room - room % width].view(dtype)
            used = start + count * width
            tensors[name] = flat[dtype].as_strided(tensor.shape, _steps(tensor.shape), start // width)
            copy.add(tensor, tensors[name])
            if not more:
                copy.run()
        flat.clear()
        if filled is not None:
            yield Bucket(filled[:used], tensors)


class _Copy:
    """Copies tensors that follow one another in memory, into a bucket where they do, too, as one."""

    def __init__(self) -> None:
        self.first: tuple[Tensor, Tensor] | None = None
        self.count = self.pieces = 0

    def add(self, source: Tensor, target: Tensor) -> None:
        if self.first is None or not self._continues(*self.first, source, target):
            self.run()
            self.first, self.count, self.pieces = (source, target), 0, 0
        self.count += source.numel()
        self.pieces += 1

    def _continues(self, first: Tensor, into: Tensor, source: Tensor, target: Tensor) -> bool:
        return (
            source.dtype == target.dtype == first.dtype == into.dtype
            and source.storage_offset() == first.storage_offset() + self.count
            and target.storage_offset() == into.storage_offset() + self.count
            and source.is_contiguous()
            and first.is_contiguous()
            and source.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        )

    def run(self) -> None:
        """Start the copy of what was added."""
        if self.first is not None:
            source, target = self.first
            if self.pieces > 1:
                row = (self.count,), (1,)
                source, target = source.as_strided(*row), target.as_strided(*row)
            target.copy_(source)
        self.first = None


@lru_cache(maxsize=1024)
def _steps(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def stream_weights(
    model: LigerCausalLM,
    *,
    names: Literal["hf", "vllm"] = "hf",
    dtype: str | torch.dtype | None = None,
    quantization: str | None = None,
    adapter: Literal["merged", "alone"] = "merged",
    since: WeightToken | None = None,
    track: bool = False,
) -> WeightStream:
    """Stream the weights of a model under a checkpoint's names, one tensor at a time.

    If the model is sharded over processes (FSDP2, divided experts), all of them must call this and iterate to
    the end together: each gathers one tensor after another. By default the bytes are those that
    `save_pretrained` writes with the same `dtype` and `quantization`.

    Args:
        model: from `from_hub` or `from_config`, maybe with PEFT's adapters in it, without a wrapper.
        names: "hf" has the names and forms of the checkpoint that was read; "vllm" those of the family's
            published checkpoints, which vLLM's and SGLang's `load_weights` take. They differ where the
            checkpoint came from transformers' `save_pretrained`, which may stack experts.
        dtype: of floating point parameters, torch.bfloat16 or "bfloat16"; "parameters" is each tensor's dtype
            in memory. Default: that of the checkpoint that was read, else that in memory.
        quantization: as in `save_pretrained`, such as "fp8-block": float8 in blocks of 128 by 128, with
            scales `..._scale_inv`.
        adapter: "merged" adds active PEFT adapters to copies of their weights, without changing the model;
            "alone" has the adapters only, under the names of PEFT's files.
        since: token of an earlier stream with the same settings. Tensors whose bits have not changed since
            then are left out, on all processes alike; those with merged adapters count as changed.
        track: record the weights' state, to get a `token` from this stream. It takes one pass over the
            weights.

    Raises:
        TypeError: not such a model.
        ConfigError: settings that do not fit together, or a token of another model or other settings.
        CheckpointError: parameters have been added or removed, or cannot be named.
        UnsupportedModelError: the weights cannot be written in that quantised format.
    """
    if not isinstance(model, LigerCausalLM):
        raise TypeError(
            "stream_weights takes a model of liger_models.from_hub or from_config, found a "
            f"{type(model).__module__}.{type(model).__name__}; pass the model inside its wrapper. Models of "
            "liger_models.hf have checkpoint_tensors()"
        )
    if names not in ("hf", "vllm") or adapter not in ("merged", "alone"):
        raise ConfigError(
            f"found names={names!r} and adapter={adapter!r}; expected names 'hf' or 'vllm', and adapter "
            "'merged' or 'alone'"
        )
    chosen: Any = dtype if dtype in (None, "parameters") else parse_dtype(dtype)
    if adapter == "alone":
        if quantization is not None:
            raise ConfigError(f"adapters are not quantised, found quantization={quantization!r}; omit it")
        weights = _adapter(model, chosen)
    else:
        weights = _whole_model(model, names, chosen, quantization)
    settings = (names, chosen, quantization, adapter)
    token = changed = None
    if track or since is not None:
        tensors = {name: local_tensor(tensor) for name, tensor in weights.sources.items()}
        token = WeightToken(dict(zip(tensors, fingerprints(tensors.values()), strict=True)), settings)
    if since is not None:
        assert token is not None
        changed = _changed(since, token, any(map(is_sharded, weights.sources.values()))) | weights.always
    return WeightStream(lambda: weights.entries(changed), token)


@dataclass(frozen=True)
class _Weights:
    """Weights to stream.

    Attributes:
        sources: the model's tensors, by native name.
        always: names of those that count as changed in any case.
        entries: the stream of those whose native names are given, or of everything.
    """

    sources: Mapping[str, Tensor]
    always: frozenset[str]
    entries: Callable[[Set[str] | None], Entries]


def _changed(old: WeightToken, new: WeightToken, sharded: bool) -> Set[str]:
    """Native names of tensors that have changed on any process."""
    if old.settings != new.settings or any(
        name not in old.prints or old.prints[name].shape != found.shape for name, found in new.prints.items()
    ):
        raise ConfigError(
            "since is the token of another model or of a stream with other settings; stream all weights "
            "first, with track=True and the same settings"
        )
    differ = [(old.prints[name].to(found.device) != found).any() for name, found in new.prints.items()]
    flags = torch.stack([flag.to(differ[0].device) for flag in differ]).to(torch.uint8)
    if sharded and dist.get_world_size() > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return {name for name, flag in zip(new.prints, flags.tolist(), strict=True) if flag}


def _whole_model(model: LigerCausalLM, names: str, dtype: Any, quantization: str | None) -> _Weights:
    layout = model.layout if names == "hf" else model.architecture.layouts[0]
    source = model.source if layout == model.layout else None
    if source is None and quantization == AS_LOADED:
        raise ConfigError(
            "quantization='as_loaded' is the form of the checkpoint that was read; pass names='hf'"
        )
    if getattr(model, "peft_config", None):
        from liger_models.hf.checkpoints.merged import merged_tensors  # imports transformers

        natives = merged_tensors(model)
    else:
        natives = {name: partial(_itself, tensor, ()) for name, tensor in model.saved_tensors().items()}
    sources = {name: get.args[0] for name, get in natives.items()}
    plan = _plan_of(model, layout, sources)
    weight_map = plan.weight_map
    check_savable(sources, weight_map)
    buffers = [name for name, tensor in sources.items() if not isinstance(tensor, nn.Parameter)]
    fixed = {ref.name for name in buffers for ref in weight_map[name].refs()}
    stated = {} if source is None or dtype == "parameters" else source.tensors
    copies: dict[str, list[str]] = {}
    for name, original in (source.tied if source else {}).items():
        copies.setdefault(original, []).append(name)

    def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
        if isinstance(dtype, torch.dtype) and tensor.is_floating_point() and name not in fixed:
            return dtype
        return stated[name].dtype if name in stated else tensor.dtype

    def entries(changed: Set[str] | None) -> Entries:
        with encoder_of(model, quantization, weight_map) as encoder:
            for writer in plan.writers:
                if changed is not None and not changed & writer.group.keys():
                    continue
                written = writer([whole(natives[name]()) for name in writer.group])
                for name in list(written):
                    tensor = written.pop(name)
                    for stored, values, form in encoded(encoder, name, tensor):
                        yield stored, values, form, encoder is None and bool(written)
                        for same in copies.get(stored, ()):
                            yield same, values, form, False
                    del tensor
            if changed is None and source is not None:
                for name, tensor in source.carried.items():
                    yield from ((*entry, False) for entry in encoded(encoder, name, tensor))
            if changed is None and encoder is not None:
                yield from ((name, tensor, tensor.dtype, False) for name, tensor in encoder.extras.items())

    def encoded(encoder: Any, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor, torch.dtype]]:
        form = dtype_of(name, tensor)
        if encoder is None:
            return ((name, tensor, form),)
        return (
            (stored, values, form if values is tensor else values.dtype)
            for stored, values in encoder.encode(name, tensor)
        )

    adapted = frozenset(name for name, get in natives.items() if get.args[1])
    return _Weights(sources, adapted, entries)


@dataclass(frozen=True)
class _Plan:
    """How a model is written in a layout, made by its first stream.

    Attributes:
        about: its conditions: the layout, the canonical forms, and the model's tensors with their shapes.
    """

    about: tuple[Any, ...]
    weight_map: dict[str, Expr]
    writers: list[Writer]


_PLANS = weakref.WeakKeyDictionary[nn.Module, dict[bool, _Plan]]()


def _plan_of(model: LigerCausalLM, layout: Layout, sources: Mapping[str, Tensor]) -> _Plan:
    """The plan of the last stream in this layout; made anew if the model has changed its form."""
    plans = _PLANS.setdefault(model, {})
    own = layout == model.layout
    shapes = [(name, shape_of(tensor)) for name, tensor in sources.items()]
    about = (layout, id(model.canonical_forms), shapes)
    if own not in plans or plans[own].about != about:
        weight_map = model.weight_map(layout)
        check_savable(sources, weight_map)
        check_whole(weight_map)
        plans[own] = _Plan(about, weight_map, [Writer(group) for group in connected(weight_map)])
    return plans[own]


def _itself(tensor: Tensor, adapters: object) -> Tensor:
    return tensor


def _adapter(model: LigerCausalLM, dtype: Any) -> _Weights:
    """PEFT's adapters in the model, by the names in PEFT's files."""
    if not getattr(model, "peft_config", None):
        raise ConfigError("the model has no adapters; omit adapter='alone'")
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(model, save_embedding_layers=False)
    sources, weight_map = dict[str, Tensor](), model.weight_map(model.modules_layout)
    for name, tensor in found.items():
        path, point, rest = name.partition(".lora_")
        expr = weight_map.get(f"{path}.weight")
        layers = adapter_layers(expr) if point and expr is not None else ""
        if isinstance(layers, str) or not layers.is_one:
            raise CheckpointError(
                f"{name} does not adapt a single linear layer of transformers' own model; call "
                "split_projections() before adding adapters and leave out stacks of experts, or stream with "
                "adapter='merged'"
            )
        sources[f"{PREFIX}{next(iter(layers.rows))}{point}{rest}"] = tensor
    if left := [name for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name]:
        raise CheckpointError(
            f"{left[0]} is trained, too, but is not part of the adapter; stream with adapter='merged'"
        )

    def entries(changed: Set[str] | None) -> Entries:
        for name, tensor in sources.items():
            if changed is None or name in changed:
                value = whole(tensor)
                yield name, value, dtype if isinstance(dtype, torch.dtype) else value.dtype, False

    return _Weights(sources, frozenset(), entries)
