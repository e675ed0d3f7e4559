"""`python -m bench [name ...]`: run the benchmarks, print their tables and save them."""

import argparse
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

from bench.table import save

ROUNDS, QUICK_ROUNDS = 1200, 200
NAMES = (
    "overhead", "dispatch", "importtime", "statistics", "gradients", "chain", "capture", "compiled", "checkpoint",
    "monitors", "trained", "ranks", "views", "hosts", "unedited",
)  # fmt: skip
BENCHMARKS = [name for name in NAMES if find_spec(f"bench.{name}")]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"which to run: {', '.join(BENCHMARKS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds to time (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, and nothing is saved")
    parser.add_argument("--only", nargs="+", default=[], help="trainers to compare, e.g. hookline ignite")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    return options


def main() -> None:
    """Run what was asked for, everything unless named."""
    options = parse()
    names = options.names or BENCHMARKS
    if len(names) == 1:
        run(names[0], options)
        return
    finished = [in_a_process_of_its_own(name) for name in names]
    raise SystemExit(not all(finished))


def run(name: str, options: argparse.Namespace) -> None:
    """Measure, print and save; a quick run, or a table without rows because a device is missing, is not saved."""
    table = import_module(f"bench.{name}").measure(QUICK_ROUNDS if options.quick else options.rounds, options.only)
    print(f"\n{table.title}\n\n{table.text()}", flush=True)
    if table.rows and not options.quick:
        print(f"\nsaved to {save(table, name)}", flush=True)


def in_a_process_of_its_own(name: str) -> bool:
    """Run one of several with the same options; what others import, a compiler say, would change what it measures."""
    flags = [word for word in sys.argv[1:] if word not in BENCHMARKS]
    return subprocess.run([sys.executable, "-m", "bench", name, *flags], check=False).returncode == 0


if __name__ == "__main__":
    main()
