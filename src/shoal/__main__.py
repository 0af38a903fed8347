"""``python -m shoal``: the command line, for ``torchrun -m shoal train ...``."""

from shoal.cli import main

main()
