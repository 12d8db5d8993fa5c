"""Forks of the process that has imported the libraries stand in for new Pythons."""

from __future__ import annotations

import os
import subprocess

import pytest
from preloaded import SERVER, command

CODE = "import os, sys; print(sys.argv, os.getcwd(), os.environ['MARK'], 'torch._dynamo' in sys.modules)"


def run(socket, folder):
    environment = os.environ | {"MARK": "own"}
    arguments = [*command(socket), "-c", CODE]
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True).stdout


def test_a_fork_has_the_callers_files_folder_and_environment(tmp_path):
    if SERVER not in os.environ:
        pytest.skip("there is no server: it is one process that tests, or there is a GPU")
    assert run(os.environ[SERVER], tmp_path) == f"['-c'] {tmp_path} own True\n"


def test_without_a_server_a_new_python_runs(tmp_path):
    assert run(str(tmp_path / "socket"), tmp_path) == f"['-c'] {tmp_path} own False\n"
