"""`python -m ringreduce` is the command `ringreduce`, for launchers that start modules, as torchrun does."""

import sys

from ringreduce.cli import main

sys.exit(main())
