"""How long the commands take to start, next to Python itself: `python bench/start.py [--rounds 9]`.

They take turns. Prints the median and the least wall time of each, and the median of its CPU time (user and system),
which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "ringreduce --help": ["-m", "ringreduce", "--help"],
    "ringreduce plan --help": ["-m", "ringreduce", "plan", "--help"],
    "ringreduce plan dgx1-v100": ["-m", "ringreduce", "plan", "dgx1-v100"],
}


def run(words: list[str]) -> tuple[float, float]:
    """Seconds on the clock, and of CPU."""
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, os.times()
    return wall, sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, words in COMMANDS.items():
            taken = run(words)
            if number:  # the first round fills the caches
                times[name].append(taken)
    for name, taken in times.items():
        wall, cpu = zip(*taken, strict=True)
        print(f"{name:28} {statistics.median(wall):.3f} s, least {min(wall):.3f}, CPU {statistics.median(cpu):.3f}")


if __name__ == "__main__":
    main()
