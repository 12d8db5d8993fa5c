"""Processes that begin with torch, transformers and the other libraries imported: forks of one process that
imports them once. Otherwise each test process, and each server of ranks.py, would import them again.

path = start_server()                       # once for all test processes
command(path)                               # stands in for the path of Python
python preloaded.py SOCKET [-u] -c CODE     # runs code in a fork, or in a new Python if no server answers
python preloaded.py SOCKET FILE             # runs a file
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile

SERVER = "LIGER_MODELS_PRELOADED"
"""The environment variable with the server's socket."""


def start_server() -> str | None:
    """Start the server, which ends with this process, and return its socket; None where forks would not be as
    good as new processes: without Linux, or with a GPU, whose context would not survive.
    """
    import torch

    if sys.platform != "linux" or torch.cuda.is_available():
        return None
    folder = tempfile.TemporaryDirectory(prefix="liger-models-")
    path = f"{folder.name}/socket"
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
    except OSError:  # such as a path of more than a hundred characters
        return None
    listener.listen(64)
    # Python warns of forks of a process with threads. Pyarrow's allocator has one, and takes part in them.
    arguments = [sys.executable, "-W", "ignore", __file__, "serve", str(listener.fileno())]
    server = subprocess.Popen(arguments, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    listener.close()

    def end() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    os.environ[SERVER] = path
    return path


def command(path: str) -> list[str]:
    """What to call in the place of Python."""
    return [sys.executable, "-S", "-E", __file__, path]


def _ask(path: str, *arguments: str) -> None:
    """Let the server run this in a fork that has this process's files, environment and folder, and wait."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        asked = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(connection, [len(asked).to_bytes(4, "little")], [0, 1, 2])
        connection.sendall(asked)
        if connection.recv(1):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork gets it, too
            # Whoever reads what the fork writes, or writes what it reads, notices its end.
            os.closerange(0, 2)
            connection.recv(1)
            os._exit(0)
    os.execv(sys.executable, [sys.executable, *arguments])


def _serve(listener: socket.socket) -> None:
    """Fork for each that asks, until stdin ends."""
    import interpreter

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interpreter.prepare()
    sys.path.pop(0)  # this folder, whose subfolders shadow packages
    _import_libraries()
    gc.collect()
    gc.freeze()
    while listener in select.select([listener, 0], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _be_asked(connection)
            return
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    with contextlib.suppress(ChildProcessError):
        while os.wait():
            pass


def _import_libraries() -> None:
    """Import what takes long, as far as it is installed."""
    for name in (
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "liger_models.parallel",
        "liger_models.cards.workshop",
        "matplotlib.pyplot",
        "bitsandbytes",
        "datasets",
        "peft",
        "trl",
        "lightning",
    ):
        with contextlib.suppress(ImportError):
            __import__(name)
    with contextlib.suppress(ImportError):
        import liger_models.hf

        liger_models.hf.register()  # imports the classes of all families
        liger_models.hf.unregister()


def _be_asked(connection: socket.socket) -> None:
    """Be the process that was asked for."""
    size, files, *_ = socket.recv_fds(connection, 4, 3)
    text = b""
    while len(text) < int.from_bytes(size, "little"):
        text += connection.recv(1 << 20)
    arguments, folder, environment = json.loads(text)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    connection.send(b"1")  # and is closed when this process ends
    file, *_ = sys.argv = arguments if os.path.exists(arguments[0]) else ["-c"]
    sys.path.insert(0, os.path.dirname(file))
    if file == "-c":
        exec(arguments[-1], {"__name__": "__main__"})
    else:
        runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        _ask(*sys.argv[1:])
