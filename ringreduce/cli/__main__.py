"""`python -m ringreduce.cli` is the command `ringreduce`."""

import sys

from ringreduce.cli import main

sys.exit(main())
