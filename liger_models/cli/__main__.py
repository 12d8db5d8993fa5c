"""`python -m liger_models.cli`: the command line where no script is installed, as under `torchrun -m`."""

import sys

from liger_models.cli import main

sys.exit(main())
