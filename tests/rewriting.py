"""The asserts of test files, rewritten once for all test processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any


def rewrite_for_all(config: Any) -> None:
    """Write what pytest caches of the files with the asked-for tests. In a new checkout each test process
    would rewrite all of them, which takes ten seconds. Does nothing where pytest has other internals.
    """
    if sys.dont_write_bytecode or not hasattr(os, "fork"):
        return
    with contextlib.suppress(ImportError, AttributeError):
        from _pytest.assertion import rewrite

        state, found = config.stash[rewrite.assertstate_key], {}
        for file in (file for argument in config.args for file in _test_files(argument)):
            cache = rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
            if not rewrite._read_pyc(file, cache):
                found[file] = cache

        def rewrite_some(files: list[Path]) -> None:
            for file in files:
                rewrite.try_makedirs(found[file].parent)
                source, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(state, code, source, found[file])

        context, count = multiprocessing.get_context("fork"), os.cpu_count() or 1
        parts = [part for start in range(count) if (part := list(found)[start::count])]
        processes = [context.Process(target=rewrite_some, args=(part,)) for part in parts]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


def _test_files(argument: str) -> list[Path]:
    path = Path(argument.partition("::")[0]).resolve()
    return [path] if path.is_file() else sorted(path.rglob("test_*.py"))
