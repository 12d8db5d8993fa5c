"""A run's output folder. One run at a time writes to it, and files not written by a run are never deleted.

    output/config.yaml                   all settings
    output/metrics.jsonl, metrics.csv, loss.png
    output/tensorboard, wandb, profile   on request
    output/checkpoint-N/             complete checkpoints for resuming (state.py)
    output/abandoned-checkpoint-N/   those after the one that a later run resumed from
    output/best/                     the model with the best evaluation, on request
    output/final/                    the trained model, or the adapter
    output/merged/                   the model with the adapter merged, on request

Folders written by a run contain `.written.json`, a manifest with each file's size, modification time and
CRC-32. It reveals bit flips, and distinguishes a run's files from files added or changed by others.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from liger_models.convert.checkpoints.atomic import atomic_folder, link_tree
from liger_models.convert.checkpoints.hub import ADAPTER_CONFIG
from liger_models.convert.errors import CheckpointError, ConfigError
from liger_models.convert.host import close, lock, open_folder

MANIFEST = ".written.json"
BEST = "best"
SETTINGS, SETTINGS_HEAD = "config.yaml", "# All settings of a run of liger-models train.\n"
STATE = "training_state"  # subfolder of a checkpoint, next to its weights
PIECE_BYTES = 16 << 20


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Lock `output`, creating it if necessary. The lock ends with the process.

    Raises:
        ConfigError: another run holds the lock, or `output` cannot be a folder.
    """
    try:
        made = not output.exists()
        output.mkdir(parents=True, exist_ok=True)
        # On the folder itself, so that a killed run leaves no lock file.
        handle = open_folder(output)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--output {output} cannot be a folder of a run ({reason})") from error
    try:
        alone = lock(handle, wait=False)
    except OSError:  # a filesystem without locks
        alone = True
    if not alone:
        close(handle)
        raise ConfigError(
            f"another run is writing to {output}; wait for it or stop it, or choose another --output"
        )
    try:
        yield
    finally:
        close(handle)
        if made:
            with contextlib.suppress(OSError):  # usually not empty
                output.rmdir()


def check_output(output: Path, *, new: bool, merge: bool = False) -> None:
    """Check, before training, for existing files where a run will write.

    Args:
        new: the run starts from scratch, so the folder must not contain a run.
        merge: the run also writes a merged model.

    Raises:
        ConfigError: something is in the way, or its origin is unknown.
    """
    if new and any((output / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise ConfigError(f"{output} is the folder of a model; choose another --output")
    finals = [output / name for name in ("final", BEST, "merged") if merge or name != "merged"]
    for final in finals:
        if os.path.lexists(final) and not final.is_dir():
            raise ConfigError(
                f"{final} is not a folder, but the trained model is written there; move it, or choose "
                "another --output"
            )
    for name in (SETTINGS, "metrics.jsonl", "metrics.csv", "loss.png"):
        path = output / name
        if os.path.lexists(path) and not path.is_file():
            raise ConfigError(f"{path} is not a file, but metrics are written there; move it")
        if new and path.is_file() and not _of_empty_run(path):
            held = "already holds a run" if name == "metrics.jsonl" else f"contains {name} from elsewhere"
            advice = "continue it with --resume, or choose another --output"
            if (output / "final" / MANIFEST).is_file() and not checkpoints(output):  # --resume would refuse
                advice = f"choose another --output (a model to train further is {output / 'final'})"
            raise ConfigError(f"{output} {held}; {advice}")
    for final in finals:
        if new and final.is_dir() and any(final.iterdir()):
            raise ConfigError(
                f"{final} is not empty; move its contents, or choose another --output (the trained model is "
                "written there)"
            )


def _of_empty_run(path: Path) -> bool:
    """Whether this was written by a run killed before its first record."""
    if path.name == SETTINGS:
        return path.read_bytes().startswith(SETTINGS_HEAD.encode())
    return path.stat().st_size == 0 or (path.suffix == ".csv" and path.read_bytes().count(b"\n") == 1)


# ----------------------------------------------------------------------------------------------- checkpoints


def checkpoints(output: Path) -> list[Path]:
    """Checkpoint folders in ascending order of steps."""
    found = {
        int(match[1]): path
        for path in output.glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d{1,18})", path.name))
        and (path / STATE / "state.json").is_file()
    }
    return [found[step] for step in sorted(found)]


def prune(output: Path, keep: int) -> None:
    """Delete the files of all but the newest `keep` checkpoints."""
    for old in checkpoints(output)[:-keep]:
        if not old.is_symlink():
            # Rename first, so that a kill halfway does not leave an incomplete folder under a valid name.
            old.rename(old.with_name(f".{old.name}.removed"))
    for doomed in output.glob(".checkpoint-*.removed"):
        _remove_written(doomed)
        if doomed.exists():  # files from elsewhere
            doomed.rename(_free_name(doomed.with_name(doomed.name[1:].replace(".removed", ".kept"))))


def abandon_after(output: Path, checkpoint: Path) -> list[Path]:
    """Rename checkpoints after `checkpoint`, since they are not part of a run that resumes from it.

    Later runs then do not resume from them, and they do not count towards the checkpoints to keep.
    """
    history = checkpoints(output)
    same = [path for path in history if path.samefile(checkpoint)]
    left = history[history.index(same[0]) + 1 :] if same else history
    aside = []
    for path in reversed(left):  # newest first: a kill halfway leaves no newer checkpoint to resume from
        aside.append(path.rename(_free_name(path.with_name(f"abandoned-{path.name}"))))
    return aside


def set_aside(folder: Path) -> Path | None:
    """Rename `folder` to abandoned-NAME; None if it does not exist."""
    if not os.path.lexists(folder):
        return None
    return folder.rename(_free_name(folder.with_name(f"abandoned-{folder.name}")))


def _free_name(path: Path) -> Path:
    free, number = path, 1
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


# -------------------------------------------------------------------------------------------------- manifests


@contextlib.contextmanager
def written_folder(target: Path) -> Iterator[Path]:
    """`atomic_folder` with a manifest. Existing files from elsewhere are kept, as NAME.old if necessary."""
    target = Path(os.path.realpath(target))
    with atomic_folder(target) as new:
        yield new
        own = _unchanged(target)
        for path in _entries(target) if target.is_dir() else ():
            name = path.relative_to(target)
            if str(name) not in own and not (path.is_dir() and (new / name).is_dir()):
                kept = _place_to_keep(new, name)
                kept.parent.mkdir(parents=True, exist_ok=True)
                link_tree(path, kept)
        files = {str(p.relative_to(new)): _describe(p) for p in _entries(new) if p.is_file()}
        text = json.dumps(files, indent=1)
        (new / MANIFEST).write_text(f"{zlib.crc32(text.encode())}\n{text}\n", encoding="utf-8")


def _place_to_keep(new: Path, name: Path) -> Path:
    place = new
    for part in name.parts[:-1]:
        place = place / part
        if place.exists() and not place.is_dir():
            place = place.with_name(f"{part}.old")
    place = place / name.name
    return _free_name(place.with_name(f"{place.name}.old")) if os.path.lexists(place) else place


def verify(folder: Path) -> None:
    """Compare every file of a folder with its manifest.

    Raises:
        CheckpointError: the first missing or changed file.
    """
    for name, entry in _read_manifest(folder).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        size, checksum = path.stat().st_size, _crc32(path)
        if [size, checksum] != [entry["bytes"], entry["crc32"]]:
            raise CheckpointError(
                f"{path} is damaged: it has {size} bytes with CRC-32 {checksum}, but was written with "
                f"{entry['bytes']} and {entry['crc32']}"
            )


def _read_manifest(folder: Path) -> dict[str, dict[str, int]]:
    path = folder / MANIFEST
    try:
        checksum, text = path.read_text(encoding="utf-8").rstrip("\n").split("\n", 1)
        files: Any = json.loads(text) if int(checksum) == zlib.crc32(text.encode()) else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    if files is None:
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    return files


def _unchanged(folder: Path) -> set[str]:
    """Files that a run wrote and that have not been modified since."""
    try:
        files = _read_manifest(folder)
    except CheckpointError:
        return set()
    own = {MANIFEST}
    for name, entry in files.items():
        with contextlib.suppress(OSError):
            found = os.lstat(folder / name)
            if [found.st_size, found.st_mtime_ns] == [entry["bytes"], entry["modified"]]:
                own.add(name)
    return own


def _remove_written(folder: Path) -> None:
    for name in sorted(_unchanged(folder) - {MANIFEST}):
        (folder / name).unlink()
    (folder / MANIFEST).unlink(missing_ok=True)
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(path)


def _entries(folder: Path) -> Iterator[Path]:
    """Files, links and empty folders below `folder`; does not follow links."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False) and any(os.scandir(entry)):
            yield from _entries(Path(entry.path))
        else:
            yield Path(entry.path)


def _describe(path: Path) -> dict[str, int]:
    found = path.stat()
    return {"bytes": found.st_size, "modified": found.st_mtime_ns, "crc32": _crc32(path)}


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return checksum
