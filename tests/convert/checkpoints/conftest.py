"""Make fake_hub and sample_files, in the same folder, importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
