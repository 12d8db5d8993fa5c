"""Reading of models' weights as dense tensors, in whatever form the files have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.reading import CheckpointReader, check_range
from liger_models.convert.checkpoints.safetensors_header import TensorInfo, build_header
from liger_models.convert.checkpoints.tensor_bytes import pieces_of
from liger_models.convert.checkpoints.weight_map import WeightMap, with_transposed
from liger_models.convert.errors import CheckpointError
from liger_models.convert.json_file import read_json
from liger_models.convert.quantised.formats import CODES, BadScaleError, QuantisedWeight
from liger_models.convert.quantised.recognition import Quantisation, recognise

DENSE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class QuantisedInfo(TensorInfo):
    """A dense tensor that `weight` describes. Its dtype is the config's, its offset that of the codes."""

    weight: QuantisedWeight


class ModelReader(CheckpointReader):
    """A reader of a model's weights. Quantised ones appear among `tensors` as dense tensors under their own
    names, and are decoded as they are read, in bands, on the device of their destination.

    Attributes:
        quantisation: of the checkpoint, or None.
        stored: the tensors in the files, by name.

    Raises:
        UnsupportedModelError, ConfigError, CheckpointError: see `recognise`.
    """

    def __init__(self, folder: str | Path):
        self.quantisation: Quantisation | None = None
        self.stored: dict[str, TensorInfo] = {}
        self._values: dict[str, Tensor] = {}
        super().__init__(folder)
        try:
            self._recognise()
        except BaseException:
            self.close()
            raise

    @property
    def is_quantised(self) -> bool:  # type: ignore[override]
        return self.quantisation is not None and bool(self.quantisation.weights)

    @property
    def decoded_dtype(self) -> torch.dtype | None:
        """The dtype in which quantised weights appear; None if there are none."""
        found = (info.dtype for info in self.tensors.values() if isinstance(info, QuantisedInfo))
        return next(found, None)

    def as_stored(self, weight_map: WeightMap) -> WeightMap:
        """The same native tensors, as expressions over tensors in the order of the files."""
        return as_stored(weight_map, self.tensors)

    def add_parts(self, infos: Mapping[str, TensorInfo], values: Mapping[str, Tensor]) -> None:
        """Add tensors of bytes: parts of quantised weights as they are in the files, and values that are in
        none of them.
        """
        self.tensors |= infos
        self._values |= values

    def read_dense(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read a whole tensor, in the order of a dense checkpoint: a quantised one in `dtype`, others in that
        of the file.
        """
        info = self.tensors[name]
        if not isinstance(info, QuantisedInfo):
            return self.read(name)
        whole = torch.empty(info.shape, dtype=dtype, device="cpu")
        self.read_into(name, whole)
        return whole.transpose(-1, -2) if info.weight.transposed else whole

    def read_into(self, name: str, dest: Tensor, start: int = 0, stop: int | None = None) -> None:
        """As `CheckpointReader.read_into`. Quantised values are decoded in float32 and rounded once.

        Raises:
            CheckpointError: as there; or a scale is not finite, or not positive.
        """
        info = self.tensors[name]
        if name in self._values:
            dest.detach().copy_(self._values[name].reshape(-1)[start:stop].view(dest.shape))
            return
        if not isinstance(info, QuantisedInfo):
            return super().read_into(name, dest, start, stop)
        stop = math.prod(info.shape) if stop is None else stop
        check_range(info, dest, start, stop)
        dest, weight = dest.detach(), info.weight

        def fetch(part: str, begin: int, end: int) -> Tensor:
            stored = torch.empty(end - begin, dtype=weight.parts[part].dtype, device="cpu")
            self.read_elements(weight.parts[part], stored, begin, end)
            return stored

        if dest.numel() == 0:
            return
        for first, piece in pieces_of(dest, torch.float32.itemsize):
            begin, end = start + first, start + first + piece.numel()
            try:
                band = weight.format.decode(weight, fetch, begin, end, piece.device)
            except BadScaleError as error:
                raise CheckpointError(f"{self.folder / info.file}: {error}") from error
            piece.copy_(band.view(piece.shape))

    def read_stored(self, name: str) -> Tensor:
        """Read a whole tensor as it is in the files."""
        info = self.stored[name]
        stored = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        self.read_elements(info, stored, 0, stored.numel())
        return stored

    def _recognise(self) -> None:
        path = self.folder / "config.json"
        config = read_json(path) if path.is_file() else {}
        self.stored = dict(self.tensors)
        metadata = {key: text for file in self.files.values() for key, text in file.metadata.items()}
        found = recognise(
            self.folder, config, self.tensors, lambda info: self.read_stored(info.name), metadata
        )
        if found is None:
            return
        self.quantisation = found
        self.tensors = dense_tensors(self.tensors, found, config)
        self.index = None  # it lists the tensors in the files
        for file, header in self.files.items():
            held = tuple(info for info in self.tensors.values() if info.file == file)
            entries = [(info.name, info.dtype, info.shape) for info in held]
            kept = {
                k: text for k, text in header.metadata.items() if k == "format" or k not in found.metadata
            }
            self.files[file] = replace(header, raw=build_header(entries, kept), metadata=kept, tensors=held)


def quantised_weights(tensors: Mapping[str, TensorInfo]) -> dict[str, QuantisedWeight]:
    """The quantised weights among a reader's tensors."""
    return {name: info.weight for name, info in tensors.items() if isinstance(info, QuantisedInfo)}


def as_stored(weight_map: WeightMap, tensors: Mapping[str, TensorInfo]) -> WeightMap:
    """The same native tensors, as expressions over these tensors in the order of the files."""
    names = {name for name, weight in quantised_weights(tensors).items() if weight.transposed}
    if not names:
        return weight_map
    return {native: with_transposed(expr, names) for native, expr in weight_map.items()}


def dense_tensors(
    tensors: Mapping[str, TensorInfo], quantisation: Quantisation, config: Mapping[str, Any]
) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint as if it were dense, in the order of the files."""
    dtype = _dtype_of(config)
    parts = {info.name for weight in quantisation.weights.values() for info in weight.parts.values()}
    parts |= {*quantisation.ignored, *quantisation.described_by}
    dense = {name: info for name, info in tensors.items() if name not in parts}
    for name, weight in quantisation.weights.items():
        codes = weight.parts[CODES]
        nbytes = math.prod(weight.shape) * dtype.itemsize
        dense[name] = QuantisedInfo(name, codes.file, dtype, weight.shape, codes.offset, nbytes, weight)
    return dict(sorted(dense.items(), key=lambda item: (item[1].file, item[1].offset)))


def _dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype of the dense model, which a config states, or bfloat16."""
    text = config.get("text_config")
    parts = [config, text if isinstance(text, Mapping) else {}]
    stated = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
    return next((DENSE_DTYPES[name] for name in map(str, stated) if name in DENSE_DTYPES), torch.bfloat16)
