"""``hf-accum-fix watch LOGS``: summarise one run, or compare several with one of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

DESCRIPTION: Final = (
    "Print the trend and noise of a run's loss, its gradient norms and its alarms, and draw them; of several runs, "
    "report whether their curves differ by more than noise."
)
EPILOG: Final = (
    "exit code: 0 no findings; 1 findings; 3 could not tell: some logs could not be read or compared, or the picture "
    "could not be written."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``watch``."""
    parser.add_argument(
        "logs",
        nargs="+",
        type=Path,
        metavar="LOGS",
        help="a folder of logs (trainer_state.json, *.jsonl, *.csv, TensorBoard events, consoles), or one such file",
    )
    parser.add_argument("--output", type=Path, default=Path("watch.png"), help="the picture (default: %(default)s)")
    parser.add_argument(
        "--against",
        metavar="RUN",
        help="the run to compare the others with (default: the one that most others agree with)",
    )
    parser.add_argument("--no-picture", action="store_true", help="print only")
    parser.add_argument(
        "--follow",
        nargs="?",
        type=float,
        const=5.0,
        metavar="SECONDS",
        help="read the logs again and again while they are written (default: every 5 s), until Ctrl-C; needs rich",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Print the report and write the picture.

    Raises:
        LogsError: if there are no logs to read, the picture cannot be written, or rich is missing.
    """
    from hf_accum_fix.monitor.run_logs import LogsError, printable, read_runs
    from hf_accum_fix.monitor.watch import look

    if arguments.follow is not None:
        from hf_accum_fix.monitor.follow import follow, followable

        if not followable():
            raise LogsError("got --follow without rich; expected it installed; pip install rich, or omit --follow")
        if not arguments.follow > 0:
            raise LogsError(f"got --follow {arguments.follow:g}; expected seconds above zero")
        return follow(arguments.logs, arguments.against, arguments.follow).exit_code
    unread: list[str] = []
    runs = [run for path in arguments.logs for run in read_runs(path, unread)]
    found = look(runs, arguments.against, unread)
    sys.stdout.write(found.words + "\n")
    if not arguments.no_picture:
        from hf_accum_fix.monitor.picture import drawable, write_picture

        if drawable():
            write_picture(runs, arguments.output)
            sys.stdout.write(f"\npicture: {printable(str(arguments.output))}\n")
        else:
            sys.stdout.write('\nno picture: matplotlib is not installed; pip install "hf-accum-fix[recipes]"\n')
    return found.exit_code
