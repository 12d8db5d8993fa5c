"""Load mutated checkpoints: each raises one clear error or gives a model with exactly the bytes of its files.

    python tests/liger_models/fuzz_checkpoints.py --seed 7 --seconds 600

A mutation changes bytes, headers, config, index or the files themselves. The outcome must be a
LigerModelsError that names the folder, within a second of CPU time, or the weights that safetensors itself
reads. The seed and the number of a mutation reproduce it.
"""

import argparse
import contextlib
import copy
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
from safetensors import safe_open

import liger_models
from liger_models.convert.errors import LigerModelsError

SHAPE = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
    },
    "rope_theta": 10000.0,
}
NASTY = [
    *(None, True, False, 0, -1, 1, 2, 7, 2**15, 2**31 - 1, 2**31, 2**62, 2**63, 2**64, 10**400, -(10**400)),
    *(0.0, 1.5, -0.5, 1e308, float("nan"), float("inf"), "", "x", "16", "\ud800", "\0", "x" * 5000, "../x"),
    *(
        [],
        [1],
        [[]],
        [None],
        [2**63, 0],
        [10**400] * 3,
        {},
        {"a": 1},
        {"rope_type": "yarn"},
        {"dtype": "F32"},
    ),
    *("F32", "F64", "BF16", "F16", "I32", "I16", "I8", "BOOL", "F8_E4M3", "F4", "llama", "mistral", "yarn"),
]


def make_originals(folder: Path) -> list[Path]:
    """Make checkpoints to mutate: of one file and of several, in two dtypes, with and without a tied head."""
    made = []
    for name, dtype, shard, changes in (
        ("single", torch.float32, None, {}),
        ("sharded", torch.bfloat16, "4kB", {}),
        ("tied", torch.bfloat16, None, {"tie_word_embeddings": True, "rope_scaling": None}),
    ):
        torch.manual_seed(0)
        model = liger_models.from_config(SHAPE | changes, dtype=dtype, device="cpu")
        model.save_pretrained(folder / name, max_shard_size=shard)
        (folder / name / "generation_config.json").write_text('{"eos_token_id": 1}')
        made.append(folder / name)
    return made


# ------------------------------------------------------------------------------------------------- mutations


def flip_bits(folder: Path, rng: random.Random) -> None:
    path = _any_file(folder, rng)
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 8]) if content else 0):
        # Half of the flips are in the first bytes, where headers are.
        place = rng.randrange(min(len(content), rng.choice([600, 10**9])))
        content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut_or_extend(folder: Path, rng: random.Random) -> None:
    path = _any_file(folder, rng)
    content = path.read_bytes()
    where = rng.randrange(len(content) + 1)
    extra = rng.randbytes(rng.choice([1, 8, 100]))
    path.write_bytes(
        rng.choice([content[:where], content + extra, content[:where] + extra + content[where:], b""])
    )


def move_a_block(folder: Path, rng: random.Random) -> None:
    path = _any_file(folder, rng)
    content = bytearray(path.read_bytes())
    size = rng.randrange(1, 64)
    a, b = (rng.randrange(max(1, len(content) - size)) for _ in range(2))
    content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]
    path.write_bytes(content)


def change_the_header(folder: Path, rng: random.Random) -> None:
    path = _any_file(folder, rng, ".safetensors")
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    _change(header, rng)
    text = json.dumps(header).encode(rng.choice(["utf-8"] * 9 + ["utf-16"]), "surrogatepass")
    stated = rng.choice([len(text)] * 9 + [rng.getrandbits(64)])
    path.write_bytes(struct.pack("<Q", stated) + text + content[8 + length :])


def change_a_json(folder: Path, rng: random.Random) -> None:
    path = _any_file(folder, rng, ".json")
    content = json.loads(path.read_bytes())
    _change(content, rng)
    path.write_text(json.dumps(content), encoding=rng.choice(["utf-8"] * 9 + ["utf-16"]))


def exchange_files(folder: Path, rng: random.Random) -> None:
    a, b = (_any_file(folder, rng) for _ in range(2))
    one, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(other)
    if rng.random() < 0.5:
        b.write_bytes(one)


def replace_a_file(folder: Path, rng: random.Random) -> None:
    path = _any_file(folder, rng)
    path.unlink()
    kind = rng.choice(["nothing", "folder", "pipe", "zero", "loop", "nowhere", "null"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "nothing":
        path.symlink_to(
            {"zero": "/dev/zero", "null": "/dev/null", "loop": path, "nowhere": "/no/where"}[kind]
        )


MUTATIONS = [
    *(flip_bits, cut_or_extend, move_a_block, change_the_header, change_the_header),
    *(change_a_json, change_a_json, exchange_files, replace_a_file),
]


def _any_file(folder: Path, rng: random.Random, suffix: str = "") -> Path:
    files = (path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    return rng.choice(sorted(path for path in files if path.name.endswith(suffix)))


def _change(content, rng: random.Random) -> None:
    """Change a random value, key or entry of a JSON object."""
    places = []

    def walk(node):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(content)
    if not places:
        return
    node, key = rng.choice(places)
    action = rng.randrange(6)
    if action == 0:
        del node[key]
    elif action == 1 and isinstance(node, dict):
        node[str(rng.choice(NASTY))] = node.pop(key)
    elif action == 2 and isinstance(node[key], int):
        node[key] += rng.choice([-1, 1, 8, -8])
    elif action == 3:  # the value from another place
        other, at = rng.choice(places)
        node[key] = copy.deepcopy(other[at])
    else:
        node[key] = rng.choice(NASTY)


# -------------------------------------------------------------------------------------------------- outcomes


class _Hang(BaseException):
    """Raised on a timeout. It is not an OSError, which a reader could take for an error of the file."""


def complaint(folder: Path) -> str | None:
    """Load a checkpoint; return what is wrong with the model or the error, or None."""

    def hangs(*_):
        raise _Hang

    handler = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(10)
    started = time.process_time()
    try:
        model = liger_models.from_hub(folder)
        return _wrong_weights(model, folder)
    except LigerModelsError as error:
        message = str(error)
        if str(folder) not in message:
            return f"the error names no file: {message[:300]}"
        if (seconds := time.process_time() - started) > 1:
            return f"the error took {seconds:.1f} s: {message[:300]}"
        if len(message) > 20_000:
            return f"the error has {len(message)} characters"
        try:
            message.encode()
        except UnicodeEncodeError:
            return "the error cannot be printed"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "".join(traceback.format_exception(error))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    return None


def _wrong_weights(model, folder: Path) -> str | None:
    parameters = dict(model.named_parameters())
    tensors = {}
    for native, expr in model.weight_map().items():
        tensors.update(
            {name: (native, view) for name, view in expr.write(parameters[native].detach()).items()}
        )
    for path in folder.glob("*.safetensors"):
        if path.name not in model.source.files:
            continue
        with safe_open(path, "pt") as file:  # it refuses damaged files
            for name in file.keys():  # noqa: SIM118
                if name in tensors:
                    native, view = tensors.pop(name)
                    expected = file.get_tensor(name).to(view.dtype)
                    if not torch.equal(view.nan_to_num(), expected.nan_to_num()):
                        return f"{native} is not {name} of {path}"
    return f"where did {sorted(tensors)[:3]} come from?" if tensors else None


@contextlib.contextmanager
def _memory_limit(more: int):
    """Limit memory, so that a large allocation raises MemoryError, which is a complaint."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(seed: int, count: int | None = None, seconds: float = float("inf")) -> list[tuple[int, str]]:
    """Return the complaints about `count` mutated checkpoints, each determined by its number alone."""
    complaints = []
    ends = time.monotonic() + seconds
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(_memory_limit(4 << 30))
        originals = make_originals(Path(scratch))
        for folder in originals:
            if problem := complaint(folder):
                raise AssertionError(f"the originals themselves do not load: {problem}")
        number = 0
        while (count is None or number < count) and time.monotonic() < ends:
            rng = random.Random(f"{seed} {number}")
            folder = Path(scratch) / f"mutated-{number}"
            shutil.copytree(rng.choice(originals), folder)
            applied = rng.choices(MUTATIONS, k=rng.choice([1, 1, 1, 2, 3]))
            for mutation in applied:
                with contextlib.suppress(ValueError, RecursionError, OSError, IndexError, struct.error):
                    mutation(folder, rng)  # fails if an earlier mutation left nothing to change
            if problem := complaint(folder):
                complaints.append((number, f"{[mutation.__name__ for mutation in applied]}: {problem}"))
            shutil.rmtree(folder)
            number += 1
    print(f"{number} mutated checkpoints, {len(complaints)} complaints", file=sys.stderr)
    return complaints


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    found = fuzz(options.seed, seconds=options.seconds)
    for at, text in found:
        print(f"--- seed {options.seed}, number {at}\n{text}")
    sys.exit(bool(found))
