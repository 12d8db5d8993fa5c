import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # for fuzz_checkpoints, which is also a program
