"""``hf-accum-fix watch LOGS``: a run in one look, or several held against the first."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

DESCRIPTION: Final = (
    "Print where a run's loss goes, how noisy it is, what its gradients do and which alarms there were, and draw it; "
    "of several runs, say whether their curves differ from the first by more than noise."
)
EPILOG: Final = "exit code: 0; 3 where no logs could be read."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``watch`` takes."""
    parser.add_argument(
        "logs",
        nargs="+",
        type=Path,
        metavar="LOGS",
        help="a folder of logs (trainer_state.json, *.jsonl, TensorBoard events), or one such file",
    )
    parser.add_argument("--output", type=Path, default=Path("watch.png"), help="the picture (default: %(default)s)")
    parser.add_argument("--no-picture", action="store_true", help="print only")


def execute(arguments: argparse.Namespace) -> int:
    """Print the report and write the picture.

    Raises:
        LogsError: if there are no logs to read.
    """
    from hf_accum_fix.monitor.run_logs import read_runs
    from hf_accum_fix.monitor.watch import report

    runs = [run for path in arguments.logs for run in read_runs(path)]
    sys.stdout.write(report(runs) + "\n")
    if not arguments.no_picture:
        from hf_accum_fix.monitor.picture import write_picture

        write_picture(runs, arguments.output)
        sys.stdout.write(f"\npicture: {arguments.output}\n")
    return 0
