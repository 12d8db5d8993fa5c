"""What a folder of a run will hold: checkpoints and the trained model.

Each process writes what it has of a tensor to where it belongs in the file that holds the tensor whole
(convert/checkpoints/tensor_files.py): the files are the same whatever the number of processes, and any number
can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from liger_models.convert.checkpoints.shards import local_tensor, part_of
from liger_models.convert.checkpoints.tensor_files import TensorFiles
from liger_models.convert.checkpoints.weight_map import Expr
from liger_models.convert.checkpoints.writing import check_free_space
from liger_models.training.checkpoints.run_folder import written_folder


@dataclass(frozen=True)
class Part:
    """Tensors of a folder.

    Attributes:
        folder: where its files lie in that one.
        files: they themselves.
        places: where in them each tensor belongs, by name.
        tensors: by name; what this process has of them.
    """

    folder: str
    files: TensorFiles
    places: Mapping[str, Expr]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Contents:
    """What a folder of a run will hold.

    Attributes:
        target: the folder.
        parts: its tensors.
        lay_out: makes in a new folder the files of all parts without values, and all else; in the first
            process alone.
        done: called in the first process when the folder is in its place.
    """

    target: Path
    parts: tuple[Part, ...]
    lay_out: Callable[[Path], None]
    done: Callable[[], None] = lambda: None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them, with the number of their part before their name."""
        return {f"{i}/{name}": x for i, part in enumerate(self.parts) for name, x in part.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Of what this process holds."""
        return sum(local_tensor(tensor).nbytes for tensor in self.tensors.values())

    def copied(self) -> Contents:
        """The same, of values as they are now, on the host."""

        def copy(tensor: Tensor) -> Tensor:
            return tensor.detach().to("cpu", copy=True)

        parts = [replace(p, tensors={n: copy(x) for n, x in p.tensors.items()}) for p in self.parts]
        return replace(self, parts=tuple(parts))

    @contextmanager
    def begun(self) -> Iterator[Path]:
        """The new folder with all its files; in its place when the block ends."""
        with written_folder(self.target) as folder:
            # When what a killed save left has been removed.
            check_free_space(self.target, sum(part.files.nbytes for part in self.parts))
            self.lay_out(folder)
            yield folder
        self.done()

    def write(self, folder: Path, pieces: Iterable[tuple[str, Sequence[int], Tensor]]) -> None:
        """Write pieces of tensors: the name, where in the whole tensor it begins, the values."""
        with ExitStack() as stack:
            writers = [
                stack.enter_context(part.files.open(folder / part.folder, sync=True)) for part in self.parts
            ]
            for key, offsets, values in pieces:
                number, _, name = key.partition("/")
                expr = part_of(self.parts[int(number)].places[name], offsets, values.shape)
                for place in expr.places(values.detach()):
                    writers[int(number)](place)
