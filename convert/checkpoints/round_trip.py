"""Verification that a checkpoint's tensors come back unchanged from their native form."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_models.convert.checkpoints.expressions import write
from liger_models.convert.checkpoints.reading import CheckpointReader
from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.checkpoints.tensor_bytes import pieces_of, same_bits
from liger_models.convert.checkpoints.weight_map import WeightMap, connected


@dataclass(frozen=True)
class RoundTrip:
    """Result of `verify_roundtrip`: the amount of data compared, the names of changed tensors, and whether
    quantised weights were compared as dense ones.
    """

    tensors: int
    nbytes: int
    changed: tuple[str, ...]
    quantised: bool = False


def verify_roundtrip(
    reader: CheckpointReader, weight_map: WeightMap, dtypes: Mapping[str, torch.dtype]
) -> RoundTrip:
    """Converts every native tensor to checkpoint form and back, and compares it with the files bit by bit.

    Holds one tensor in memory at a time, or those that share a checkpoint tensor, in the model's dtype
    (`dtypes`, by native name).
    """
    changed: list[str] = []
    infos: list[TensorInfo] = []
    weight_map = reader.as_stored(weight_map)
    for together in connected(weight_map):
        names = {ref.name: None for expr in together.values() for ref in expr.refs()}
        infos += [reader.tensors[name] for name in names]
        natives = {name: torch.empty(expr.shape, dtype=dtypes[name]) for name, expr in together.items()}
        for native_name, expr in together.items():
            expr.read_into(natives[native_name], reader.read_into)
        pairs = [(together[name], native) for name, native in natives.items()]
        for name, tensor in (pairs[0][0].write(pairs[0][1]) if len(pairs) == 1 else write(pairs)).items():
            if not _equals_file(reader, reader.tensors[name], tensor):
                changed.append(name)
    nbytes = sum(info.nbytes for info in infos)
    return RoundTrip(len(infos), nbytes, tuple(changed), reader.is_quantised)


def _equals_file(reader: CheckpointReader, info: TensorInfo, tensor: Tensor) -> bool:
    for first, piece in pieces_of(tensor, info.dtype.itemsize):
        expected = torch.empty(piece.shape, dtype=info.dtype)
        reader.read_into(info.name, expected, first, first + piece.numel())
        if not same_bits(torch.empty_like(expected).copy_(piece), expected):
            return False
    return True
