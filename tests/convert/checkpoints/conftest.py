"""Makes sample_files, which lies beside it, importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
