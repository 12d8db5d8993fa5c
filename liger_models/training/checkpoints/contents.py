"""Contents of a run's output folders: checkpoints and the trained model.

Each process writes its part of a tensor at the tensor's place in the file
(convert/checkpoints/tensor_files.py), so the files do not depend on the number of processes, and any number
of processes can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from liger_models.convert.checkpoints.expressions import Expr
from liger_models.convert.checkpoints.shards import local_tensor, part_of
from liger_models.convert.checkpoints.tensor_files import TensorFiles
from liger_models.convert.checkpoints.writing import check_free_space
from liger_models.training.checkpoints.run_folder import written_folder


@dataclass(frozen=True)
class Part:
    """Tensors of a folder.

    Attributes:
        folder: subfolder of their files.
        files: the files.
        places: place of each tensor in the files, by name.
        tensors: this process's tensors or shards, by name.
    """

    folder: str
    files: TensorFiles
    places: Mapping[str, Expr]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Contents:
    """Contents of an output folder of a run.

    Attributes:
        target: the folder.
        parts: its tensors.
        lay_out: writes everything except tensor values to a new folder, including the files of all parts;
            runs in the first process only.
        done: called in the first process after the folder has been moved to its target.
    """

    target: Path
    parts: tuple[Part, ...]
    lay_out: Callable[[Path], None]
    done: Callable[[], None] = lambda: None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, named with their part's number as a prefix."""
        return {f"{i}/{name}": x for i, part in enumerate(self.parts) for name, x in part.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of this process's tensors."""
        return sum(local_tensor(tensor).nbytes for tensor in self.tensors.values())

    def copied(self) -> Contents:
        """Copy with the current values, in host memory."""

        def copy(tensor: Tensor) -> Tensor:
            return tensor.detach().to("cpu", copy=True)

        parts = [replace(p, tensors={n: copy(x) for n, x in p.tensors.items()}) for p in self.parts]
        return replace(self, parts=tuple(parts))

    @contextmanager
    def begun(self) -> Iterator[Path]:
        """Create the new folder with all its files; it is moved to its target when the block ends."""
        with written_folder(self.target) as folder:
            # After the remains of a killed save have been removed.
            check_free_space(self.target, sum(part.files.nbytes for part in self.parts))
            self.lay_out(folder)
            yield folder
        self.done()

    def write(self, folder: Path, pieces: Iterable[tuple[str, Sequence[int], Tensor]]) -> None:
        """Write pieces of tensors: name, offsets in the whole tensor, values."""
        with ExitStack() as stack:
            writers = [
                stack.enter_context(part.files.open(folder / part.folder, sync=True)) for part in self.parts
            ]
            for key, offsets, values in pieces:
                number, _, name = key.partition("/")
                expr = part_of(self.parts[int(number)].places[name], offsets, values.shape)
                for place in expr.places(values.detach()):
                    writers[int(number)](place)
