"""Puts installed packages before the checkout's folders on the path: transformers looks for a package called
kernels, which must not be ours. To be imported before transformers.
"""

import sys
from pathlib import Path

from benchmarks import ROOT

sys.path.sort(key=lambda path: Path(path or ".").resolve() == ROOT)
