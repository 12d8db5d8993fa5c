"""Low-rank adapters (LoRA) in PEFT's files, and their merging into the weights of the base model.

    W' = W + s B A                          s = alpha / r, with rsLoRA alpha / sqrt(r)
    W' = m (W + s B A) / |W + s B A|        with DoRA; norms of rows
    W'_e = W_e + s B_e A_e                  of stacked experts; the columns of B are rank by rank

LoRA: Hu et al., 2021, arXiv:2106.09685; DoRA: Liu et al., 2024, arXiv:2402.09353; rsLoRA: Kalajdzievski,
2023, arXiv:2312.03732. Sums and products are computed in float32 and rounded once, to the weight's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.adapter_forms import StackOrder, is_transposed, stack_order
from liger_models.convert.checkpoints.expressions import write
from liger_models.convert.checkpoints.hub import ADAPTER_CONFIG, local_path, resolve
from liger_models.convert.checkpoints.reading import CheckpointReader
from liger_models.convert.checkpoints.shards import is_sharded
from liger_models.convert.checkpoints.weight_map import WeightMap, connected
from liger_models.convert.errors import CheckpointError, LigerModelsError
from liger_models.convert.json_file import read_json

PREFIX = "base_model.model."  # of names in PEFT's files
PARTS = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector", ".lora_magnitude_vector.weight")
ROWS = ".token_adapter.trainable_tokens_delta"  # trained rows themselves, in spite of the name
# Settings with another meaning than that of the formulas above, and the values without effect.
_REFUSED = ("lora_bias", "alpha_pattern", "alora_invocation_tokens", "layer_replication")


@dataclass(frozen=True)
class LowRankAdapter:
    """A folder with a low-rank adapter in PEFT's files.

    Attributes:
        folder: the folder.
        config: contents of its adapter_config.json.
        base: name or folder of the model that it adapts.
    """

    folder: Path
    config: Mapping[str, Any]
    base: str

    @classmethod
    def open(cls, folder: Path, base: str | Path | None = None) -> LowRankAdapter:
        """Read an adapter's config.

        Args:
            folder: with adapter_config.json.
            base: name or folder of the base model. Default: the one in the config.

        Raises:
            CheckpointError: another kind of adapter, or no base model is named.
        """
        path = folder / ADAPTER_CONFIG
        if base and not path.is_file():
            raise CheckpointError(f"{folder} is not an adapter, so it has no base model; omit base= (--base)")
        config = read_json(path)
        if config.get("peft_type") != "LORA":
            raise CheckpointError(
                f"{path}: peft_type is {config.get('peft_type')!r}; only low-rank adapters ('LORA') can be "
                "read; merge others with PEFT's merge_and_unload()"
            )
        if found := [key for key in _REFUSED if config.get(key)]:
            raise CheckpointError(
                f"{path}: {found[0]} is {config[found[0]]!r}, which is not supported; merge the adapter with "
                "PEFT's merge_and_unload()"
            )
        named = base or config.get("base_model_name_or_path")
        if not named:
            raise CheckpointError(f"{path}: does not name a base model; pass it as base= (--base)")
        return cls(folder, config, str(named))

    def resolve_base(self, **options: Any) -> Path:
        """The folder of the base model; `options` as for `resolve`.

        Raises:
            CheckpointError, HubError: it cannot be found.
        """
        try:
            return resolve(self.base, **options)
        except LigerModelsError as error:
            raise type(error)(
                f"{self.folder}: holds an adapter of {self.base}, which cannot be loaded: {error}. If that "
                "model is elsewhere, pass it as base= (--base)"
            ) from error

    @property
    def labels(self) -> int | None:
        """Number of labels of an adapted sequence classifier; None for language models."""
        if self.config.get("task_type") != "SEQ_CLS":
            return None
        return next((int(x.shape[0]) for name, x in self.tensors().items() if name == "score.weight"), None)

    def trained_rows(self, layer: str) -> list[int]:
        """The rows of an embedding or a head whose values are trained (PEFT's `trainable_token_indices`)."""
        stated = self.config.get("trainable_token_indices") or {}
        if isinstance(stated, list):
            return stated
        return next((rows for name, rows in stated.items() if f".{layer}".endswith(f".{name}")), [])

    @property
    def tokens(self) -> list[int]:
        """All ids with trained rows, in order."""
        stated = self.config.get("trainable_token_indices") or {}
        lists = [stated] if isinstance(stated, list) else stated.values()
        return sorted({row for rows in lists for row in rows})

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their names in the file, without PEFT's prefix."""
        with CheckpointReader(self.folder) as reader:
            return {name.removeprefix(PREFIX): reader.read(name) for name in reader.tensors}

    def layers(self) -> list[str]:
        """Names of the adapted layers."""
        names = (_split(name) for name in self.tensors())
        return list(dict.fromkeys(layer for layer, part in names if part))

    @torch.no_grad()
    def merge(
        self,
        parameters: Mapping[str, Tensor],
        weight_maps: Iterable[WeightMap],
        says_transposed: bool = False,
    ) -> None:
        """Merge the adapter into a model's tensors in place.

        Args:
            parameters: the tensors, by native name.
            weight_maps: for each form of checkpoint names; the first that has all names of the adapter is
                used.
            says_transposed: see `stack_order`.

        Raises:
            CheckpointError: the adapter does not fit the model, or the model is sharded.
        """
        if any(map(is_sharded, parameters.values())):
            raise CheckpointError(
                f"{self.folder}: an adapter cannot be merged into a model that is sharded over processes; "
                "merge it first: liger-models merge ADAPTER OUT"
            )
        layers: dict[str, dict[str, Tensor]] = {}
        whole: dict[str, Tensor] = {}
        for name, tensor in self.tensors().items():
            layer, part = _split(name)
            if name.endswith(ROWS):
                layers.setdefault(f"{name.removesuffix(ROWS)}.weight", {})[ROWS] = tensor
            elif part:
                layers.setdefault(self._stack(layer) or f"{layer}.weight", {})[part] = tensor
            elif "lora_" not in name:
                whole[name] = tensor  # a layer that was trained in full
            else:
                layers.setdefault(name, {})[name] = tensor
        names = layers.keys() | whole.keys()
        weight_map, unknown = self._fitting(names, weight_maps)
        if unknown:
            raise CheckpointError(
                f"{self.folder}: adapts {len(unknown)} tensors that {self.base} does not have, such as "
                f"{unknown[0]!r}; pass the model that it was trained on as base= (--base), or merge it with "
                "PEFT's merge_and_unload()"
            )
        for group in connected(weight_map):
            found = {ref.name for expr in group.values() for ref in expr.refs()} & names
            if not found:
                continue
            stack = len(group) == 1 and all(len(expr.shape) == 3 for expr in group.values())
            if stack and found <= layers.keys() and all(len([*expr.refs()]) == 1 for expr in group.values()):
                ((native, expr),) = group.items()
                (name,) = found
                order = stack_order([expr], says_transposed)
                parameters[native].copy_(self._merged_stack(name, parameters[native], layers[name], order))
                continue
            tensors = write((expr, parameters[name]) for name, expr in group.items())
            # PEFT's `fan_in_fan_out` follows from the layer: GPT-2's have transposed weights.
            transposed = any(map(is_transposed, group.values()))
            for name in found:
                if tensors[name].dim() == 3:
                    raise CheckpointError(
                        f"{self.folder}: adapts {name!r}, experts that {self.base} splits differently; "
                        "merge it with PEFT's merge_and_unload()"
                    )
                if transposed and name in layers and name.endswith(".weight"):
                    tensors[name] = self._merged(name, tensors[name].t(), layers[name], None).t()
                else:
                    tensors[name] = self._merged(name, tensors[name], layers.get(name), whole.get(name))
            for native, expr in group.items():
                parameters[native].copy_(expr.read(tensors.__getitem__))

    def _stack(self, layer: str) -> str | None:
        """The stack of experts that a wrapper of PEFT's adapts, if it is one. PEFT wraps a module once for
        each of its `target_parameters`, the wrapper of down_proj outside.
        """
        module, *inner = layer.split(".base_layer")
        leaves = [
            name.rpartition(".")[2]
            for name in self.config.get("target_parameters") or ()
            if f".{module}".endswith(f".{name.rpartition('.')[0]}") and not name.endswith(".weight")
        ]
        leaves = sorted(set(leaves), key="down_proj".__eq__)
        return f"{module}.{leaves[-1 - len(inner)]}" if len(inner) < len(leaves) else None

    def _fitting(self, names: Iterable[str], weight_maps: Iterable[WeightMap]) -> tuple[WeightMap, list[str]]:
        """The weight map with the most of these names, and the names that it lacks."""
        best: tuple[WeightMap, list[str]] | None = None
        for weight_map in weight_maps:
            known = {ref.name for expr in weight_map.values() for ref in expr.refs()}
            unknown = sorted(name for name in names if name not in known)
            if best is None or len(unknown) < len(best[1]):
                best = weight_map, unknown
        assert best is not None
        return best

    def _merged(
        self, name: str, weight: Tensor, parts: Mapping[str, Tensor] | None, whole: Tensor | None
    ) -> Tensor:
        if whole is not None:
            self._check_shape(name, whole, weight.shape)
            return whole.to(weight)
        assert parts is not None
        if ROWS in parts:
            rows = self.trained_rows(name.removesuffix(".weight"))
            self._check_shape(name, parts[ROWS], (len(rows), *weight.shape[1:]))
            at = torch.tensor(rows, device=weight.device)
            return weight.index_copy(0, at, parts[ROWS].to(weight))
        if not {".lora_A.weight", ".lora_B.weight"} <= parts.keys() or weight.dim() != 2:
            raise CheckpointError(
                f"{self.folder}: the adapter of {name!r} has the parts {sorted(parts)} for a weight of shape "
                f"{tuple(weight.shape)}; expected lora_A and lora_B of a matrix"
            )
        a, b = (parts[part].to(weight.device, torch.float32) for part in PARTS[:2])
        r = a.shape[0]
        self._check_shape(name, a, (r, weight.shape[1]))
        self._check_shape(name, b, (weight.shape[0], r))
        merged = torch.addmm(weight.float(), b, a, alpha=self._scale(r))
        magnitude = next((parts[part] for part in PARTS[2:] if part in parts), None)
        if magnitude is not None:
            self._check_shape(name, magnitude, (weight.shape[0],))
            merged *= (magnitude.to(merged) / merged.norm(dim=1))[:, None]
        return merged.to(weight.dtype)

    def _merged_stack(
        self, name: str, weight: Tensor, parts: Mapping[str, Tensor], order: StackOrder | None
    ) -> Tensor:
        """Merge into a stack [E, outputs, inputs] in the model's order."""
        num_experts, outputs, inputs = weight.shape
        a, b = (parts[part].to(weight.device, torch.float32) for part in PARTS[:2])
        if order is not None:
            if len(b) != (inputs if order.exchanged else outputs):
                self._check_shape(name, b, (inputs if order.exchanged else outputs, b.shape[1]))
            a, b = order.read(a, b)
        r = len(a) // num_experts
        self._check_shape(name, a, (r * num_experts, inputs))
        self._check_shape(name, b, (outputs, r * num_experts))
        merged = torch.empty_like(weight)
        for e in range(num_experts):  # one by one: a stack in float32 may not fit
            of_expert = a[e * r : (e + 1) * r], b[:, e::num_experts]
            merged[e] = torch.addmm(weight[e].float(), of_expert[1], of_expert[0], alpha=self._scale(r))
        return merged

    def _scale(self, rank: int) -> float:
        alpha: float = self.config.get("lora_alpha", 8)
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _check_shape(self, name: str, tensor: Tensor, expected: Iterable[int]) -> None:
        if tuple(tensor.shape) != tuple(expected):
            raise CheckpointError(
                f"{self.folder}: the adapter of {name!r} has a tensor of shape {tuple(tensor.shape)}, but "
                f"{self.base} needs {tuple(expected)}; pass the model that it was trained on as base= "
                "(--base)"
            )


def resolve_model(
    name: str | Path, base: str | Path | None = None, **options: Any
) -> tuple[Path, LowRankAdapter | None]:
    """The folder of a model and the adapter to merge into it, if `name` is an adapter.

    Args:
        name: folder or hub name of a model or an adapter.
        base: of an adapter. Default: the base model that its config names.
        options: of `resolve`.

    Raises:
        CheckpointError, HubError: as in `resolve`; or `base` was given, and `name` is not an adapter.
    """
    folder = resolve(name, adapter=True, **options)
    if not (folder / ADAPTER_CONFIG).is_file():
        if base is not None:
            raise CheckpointError(f"{name} is not an adapter, so it has no base model; omit base= (--base)")
        return folder, None
    adapter = LowRankAdapter.open(folder, base)
    return adapter.resolve_base(**{k: v for k, v in options.items() if k != "revision"}), adapter


def absolute_if_folder(name: str) -> str:
    """The absolute path of a folder, so that its name means the same everywhere; other names unchanged."""
    path = local_path(name)
    return str(path.absolute()) if path.is_dir() else name


def _split(name: str) -> tuple[str, str]:
    """The layer and the part of an adapter's tensor; no part for other tensors."""
    for part in sorted(PARTS, key=len, reverse=True):
        if name.endswith(part):
            return name.removesuffix(part), part
    return name, ""
