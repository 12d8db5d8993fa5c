import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # for adapted, which programs in this folder import too
