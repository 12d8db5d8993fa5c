"""The folder of a run: one run at a time writes to it, and nothing that a run did not write is ever deleted.

    output/metrics.jsonl, metrics.csv, loss.png
    output/tensorboard, wandb, profile   where those were asked for
    output/checkpoint-N/             whole checkpoints to go on from (state.py)
    output/abandoned-checkpoint-N/   those after the one that a later run went on from
    output/final/                    the trained model, or the adapter
    output/merged/                   the model with the adapter in it, if that was asked for

A folder that a run writes holds `.written.json`, its manifest: of each file the size, the time of its last
change and a CRC-32. With it bit flips are noticed, and files of a run are told from those that somebody put
beside them or changed since.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from liger_models.convert.checkpoints.atomic import atomic_folder, link_tree
from liger_models.convert.errors import CheckpointError, ConfigError

MANIFEST = ".written.json"
STATE = "training_state"  # of a checkpoint, beside its weights
PIECE_BYTES = 16 << 20


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Keeps other runs out of `output`, which is made if need be. The lock dies with its process.

    Raises:
        ConfigError: another run holds it, or `output` cannot be a folder.
    """
    try:
        made = not output.exists()
        output.mkdir(parents=True, exist_ok=True)
        # Of the folder itself: there is no file that a killed run could leave behind.
        handle = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--output {output} cannot be a folder of a run ({reason})") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise ConfigError(
            f"another run is writing to {output}; wait for its end or stop it, or choose another --output"
        ) from error
    except OSError:  # a filesystem without locks
        pass
    try:
        yield
    finally:
        os.close(handle)
        if made:
            with contextlib.suppress(OSError):  # there is something in it, as there should be
                output.rmdir()


def check_output(output: Path, *, new: bool, merge: bool = False) -> None:
    """Looks, before training, at what stands where a run will write.

    Args:
        new: the run begins anew, so that there must not be one yet.
        merge: it will write a merged model too.

    Raises:
        ConfigError: something is in the way, or belongs to nobody knows whom.
    """
    finals = [output / name for name in ("final", "merged") if merge or name == "final"]
    for final in finals:
        if os.path.lexists(final) and not final.is_dir():
            raise ConfigError(
                f"{final} is not a folder, and the trained model is written there; move it, or choose "
                "another --output"
            )
    for name in ("metrics.jsonl", "metrics.csv", "loss.png"):
        path = output / name
        if os.path.lexists(path) and not path.is_file():
            raise ConfigError(f"{path} is not a file, and metrics are written there; move it away")
        if new and path.is_file() and not _is_empty_table(path):
            held = "already holds a run" if name == "metrics.jsonl" else f"holds {name} of something else"
            raise ConfigError(f"{output} {held}; go on with --resume, or choose another --output")
    for final in finals:
        if new and final.is_dir() and any(final.iterdir()):
            raise ConfigError(
                f"{final} is not empty; move what is there, or choose another --output (a run puts its "
                "trained model there)"
            )


def _is_empty_table(path: Path) -> bool:
    """What a run leaves that was killed before its first record."""
    return path.stat().st_size == 0 or (path.suffix == ".csv" and path.read_bytes().count(b"\n") == 1)


# ----------------------------------------------------------------------------------------------- checkpoints


def checkpoints(output: Path) -> list[Path]:
    """The checkpoint folders, by rising step."""
    found = {
        int(match[1]): path
        for path in output.glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d{1,18})", path.name))
        and (path / STATE / "state.json").is_file()
    }
    return [found[step] for step in sorted(found)]


def prune(output: Path, keep: int) -> None:
    """Removes the files of all but the newest `keep` checkpoints."""
    for old in checkpoints(output)[:-keep]:
        if not old.is_symlink():
            # Renamed first: a kill halfway must not leave half a folder under the name of a whole one.
            old.rename(old.with_name(f".{old.name}.removed"))
    for doomed in output.glob(".checkpoint-*.removed"):
        _remove_written(doomed)
        if doomed.exists():  # somebody's own files
            doomed.rename(_free_name(doomed.with_name(doomed.name[1:].replace(".removed", ".kept"))))


def abandon_after(output: Path, checkpoint: Path) -> list[Path]:
    """Sets aside what a run that goes on from `checkpoint` leaves behind: they are no part of its history.

    Neither does a later run go on from them, nor do they push the new ones out.
    """
    history = checkpoints(output)
    same = [path for path in history if path.samefile(checkpoint)]
    left = history[history.index(same[0]) + 1 :] if same else history
    aside = []
    for path in reversed(left):  # the newest first: what a kill leaves is not gone on from either
        aside.append(path.rename(_free_name(path.with_name(f"abandoned-{path.name}"))))
    return aside


def _free_name(path: Path) -> Path:
    free, number = path, 1
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


# -------------------------------------------------------------------------------------------------- manifests


@contextlib.contextmanager
def written_folder(target: Path) -> Iterator[Path]:
    """As `atomic_folder`, with a manifest. What no run wrote stays, as NAME.old where its name is needed."""
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
    """Compares every file of a folder with its manifest.

    Raises:
        CheckpointError: names the first that is missing or whose bytes have changed.
    """
    for name, entry in _read_manifest(folder).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        size, checksum = path.stat().st_size, _crc32(path)
        if [size, checksum] != [entry["bytes"], entry["crc32"]]:
            raise CheckpointError(
                f"{path} is damaged: it has {size} bytes with the CRC-32 {checksum}, and was written with "
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
        raise CheckpointError(f"{path} is damaged: it does not have its own checksum")
    return files


def _unchanged(folder: Path) -> set[str]:
    """The files that a run wrote and that nobody has touched since."""
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
    """Files, links and empty folders below `folder`; links are not followed."""
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
