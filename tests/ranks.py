"""Multi-process tests: all ranks run one program, in a file next to its test. They are forked from a process
that has imported the program, itself forked from one that imported torch and liger_models once for all tests.

found = run_ranks(RANK, tmp_path, "fsdp")                 # in test_NAME.py, RANK being NAME_rank.py

def results(folder, rank, ranks, wrapper): ...            # in NAME_rank.py

`Fork` runs a piece of code in a process that may be killed, from the same server.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from preloaded import SERVER, command


class Count:
    """Counts the bytes of tensors read from checkpoints within it."""

    def __enter__(self) -> Count:
        self.nbytes, self.true = 0, os.preadv
        os.preadv = self
        return self

    def __call__(self, *arguments: Any) -> int:
        count = self.true(*arguments)
        self.nbytes += count
        return count

    def __exit__(self, *exc: object) -> None:
        os.preadv = self.true


def run_ranks(
    program: Path,
    folder: Path,
    *arguments: str,
    ranks: int = 2,
    backend: str = "gloo",
    seconds: float = 300,
) -> list[Any]:
    """Return the program's `results` of each rank. If a rank fails, fails with all errors; on a timeout, with
    every rank's stack.
    """
    environment = {**os.environ, "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    complaints = folder / "complaints"
    run = [time.time() + seconds, str(program), backend, str(folder), *arguments]
    all_ranks = Fork("ranks", *run, output=complaints, environment=environment)
    ended = all_ranks.wait(seconds)
    assert ended == 0, f"{program.name} ended with {ended}\n{complaints.read_text()}"
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


class Fork:
    """A process forked by the server, one at a time.

    Fork("code", code, *arguments, output=file)     # runs Python code, with sys.argv[1:] as given
    Fork("ranks", ...)                              # runs all ranks of a program: see `run_ranks`
    Fork("launch", imports, code, ranks, *arguments, output=file)  # runs code in ranks, as torchrun does
    """

    def __init__(
        self, task: str, *arguments: Any, output: Path, environment: dict[str, str] | None = None
    ) -> None:
        environment = dict(os.environ if environment is None else environment)
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a GPU's context would not survive a fork
        self._server = _server()
        run = json.dumps([environment, str(output), task, *arguments])
        self._server.stdin.write(run.encode() + b"\n")
        self.output = output  # of stdout and stderr
        self.pid = int(self._server.stdout.readline())  # process group of all that it starts

    def wait(self, seconds: float = 120) -> int | str:
        """Return the exit code, negative after a signal, or a sentence on a timeout."""
        if wait([self._server.stdout], seconds):
            return int(self._server.stdout.readline())
        time.sleep(2)  # the ranks print their stacks
        with contextlib.suppress(ProcessLookupError):  # it may just have ended
            os.killpg(self.pid, signal.SIGKILL)
        return f"{self._server.stdout.readline().decode().strip()}: not done in {seconds:g} s"


@functools.cache
def _server() -> Any:
    """Start the fork server, which ends with this process, the owner of its stdin pipe."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # Unbuffered: `wait` would not see data read ahead.
    python = command(os.environ[SERVER]) if SERVER in os.environ else [sys.executable]
    return subprocess.Popen([*python, __file__], env=environment, bufsize=0, **pipes)


def use_threads_of_tests() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@functools.cache
def fork_server() -> Any:
    """Return a multiprocessing context whose processes are forks of one that has imported what jobs need. It
    stands in for "spawn", whose processes would each import torch.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch._inductor.compile_fx",
            "liger_models.models.loading",
            "transformers.models.auto.modeling_auto",
        ]
    )
    return context


def _serve() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter

        interpreter.prepare()
    sys.path.pop(0)  # this folder, whose subfolders shadow packages
    sys.modules["ranks"] = sys.modules["__main__"]
    import torch._dynamo  # noqa: F401 - imported by FSDP2

    import liger_models.parallel  # noqa: F401
    from liger_models.training import loop

    loop.plot_losses, os.fsync = lambda *_: False, lambda handle: None  # as in conftest.py
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        environment, output, task, *arguments = json.loads(line)
        if _needs_transformers(task, arguments):
            _import_transformers()
        number = os.fork()
        if number == 0:
            os.setsid()
            os.environ.clear()
            os.environ.update(environment)
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, 1)
            os.dup2(file, 2)
            {"ranks": _be_all_ranks, "code": _be_code, "launch": _launch}[task](*arguments)
        print(number, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), file=answers, flush=True)


@functools.cache
def _import_transformers() -> None:
    """Import it with the classes of all families, which takes longer than most programs."""
    import liger_models.hf

    liger_models.hf.register()
    liger_models.hf.unregister()


def _needs_transformers(task: str, arguments: list[Any]) -> bool:
    if task == "launch":
        return "sharded_rank" in arguments[0]  # in tests/hf
    return task == "ranks" and "liger_models.hf" in Path(arguments[1]).read_text()


def _be_all_ranks(end: float, program: str, backend: str, folder: str, *arguments: str) -> NoReturn:
    faulthandler.enable()
    code = 1
    try:
        code = _run_all(end, program, backend, Path(folder), *arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _be_code(code: str, *arguments: str) -> NoReturn:
    use_threads_of_tests()
    sys.argv = ["-c", *arguments]
    status: Any = 1
    try:
        exec(code, {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)


def _launch(imports: str, code: str, ranks: int, *arguments: str) -> NoReturn:
    """Run code in ranks with torchrun's environment, forked after the imports."""
    # As torchrun does, so that no other test takes the port between its choice and its use.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    status = 1
    try:
        exec(imports, {})
        children = set()
        for rank in range(ranks):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if (child := os.fork()) == 0:
                _be_code(code, *arguments)
            children.add(child)
        status = 0
        while children:
            child, ended = os.wait()
            children.remove(child)
            if ended and not status:
                status = 1
                for other in children:  # they may wait for it
                    os.kill(other, signal.SIGKILL)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _run_all(end: float, program: str, backend: str, folder: Path, *arguments: str) -> int:
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(program).parent))
    results = runpy.run_path(program)["results"]
    context = multiprocessing.get_context("fork")
    ranks = int(os.environ["WORLD_SIZE"])
    children = [
        context.Process(target=_be_a_rank, args=(end, results, backend, folder, rank, ranks, *arguments))
        for rank in range(ranks)
    ]
    for child in children:
        child.start()
    waiting = {child.sentinel: child for child in children}
    while waiting and not any(child.exitcode for child in children):
        for sentinel in wait(list(waiting)):
            waiting.pop(sentinel).join()
    codes = [child.exitcode for child in children]
    for child in children:  # they may wait for one that failed
        child.kill()
    if any(codes):
        print(f"ranks ended with {codes}", file=sys.stderr)
    return int(any(codes))


def _be_a_rank(
    end: float,
    results: Callable[..., Any],
    backend: str,
    folder: Path,
    rank: int,
    ranks: int,
    *arguments: str,
) -> None:
    # After a fork, torch replaces its pool of threads when it is next used. If several threads do so at once,
    # such as those that read a checkpoint, it raises "Invalid thread pool".
    use_threads_of_tests()
    # By a thread that needs nothing of Python's: a signal waits for a call of the GPU's driver to end.
    faulthandler.dump_traceback_later(max(1.0, end - time.time()))
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    # They meet in a file: a port that was free a moment ago may be another test's by now. And in a file of
    # their own: what ranks before them left in it says where those were.
    store = dist.FileStore(str(folder / f"meeting{os.getppid()}"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    torch.save(results(folder, rank, ranks, *arguments), folder / f"rank{rank}.pt")
    # No rank leaves while another may wait for its message.
    store.set(f"rank {rank} is done", "")
    store.wait([f"rank {other} is done" for other in range(ranks)])
    # Objects that outlive their process group sometimes wait forever; those of `results` are freed by now.
    dist.destroy_process_group()


if __name__ == "__main__":
    _serve()
