"""``hf-accum-fix watch LOGS``: summarise one run, or compare several with the first."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from hf_accum_fix.cli import COULD_NOT_TELL, complain, write

DESCRIPTION: Final = """\
Print the trend of a run's loss, its gradient norms and its alarms; of several
runs, report the ratio of their losses at equal steps.
"""
EPILOG: Final = """\
exit code: 0 no findings; 1 findings; 3 no findings, but some logs could not be
read or compared.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``watch``."""
    about = "a folder of logs (trainer_state.json, *.jsonl, *.csv, consoles), or one such file"
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOGS", help=about)


def execute(arguments: argparse.Namespace) -> int:
    """Print the report; what is wrong with one log hides nothing of the rest."""
    from hf_accum_fix.monitor.run_logs import read_runs
    from hf_accum_fix.monitor.series import LogsError, Run
    from hf_accum_fix.monitor.watch import look

    unread, runs = list[str](), list[Run]()
    for path in arguments.logs:
        try:
            runs += read_runs(path, unread)
        except LogsError as error:
            unread.append(str(error))
    if not runs:
        complain(f"hf-accum-fix watch: {'; '.join(unread)}")
        return COULD_NOT_TELL
    found = look(runs, unread)
    write(found.words + "\n")
    return found.exit_code
