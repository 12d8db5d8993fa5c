"""`python -m liger_models.cli`: the command line if the script is not installed, as under `torchrun -m`."""

import sys

from liger_models.cli import main

sys.exit(main())
