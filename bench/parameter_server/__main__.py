"""What the parameter server takes, a scenario at a time; docs/parameter_server_how.md has the tables.

python -m bench.parameter_server steps --peers all --sizes 64M --json steps.json
python -m bench.parameter_server kills --help
"""

import sys

from bench import harness
from bench.parameter_server import costs, kills, lines, modes, rows, steps

if __name__ == "__main__":
    scenarios = (
        *(steps.steps, rows.rows, modes.modes, lines.lines, lines.moves),
        *(costs.readers, costs.snapshots, costs.backups, costs.late, kills.kills),
    )
    sys.exit(harness.main(*scenarios))
