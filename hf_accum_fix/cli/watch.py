"""``hf-accum-fix watch LOGS``: summarise one run, or compare several with one of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from hf_accum_fix.cli import COULD_NOT_TELL, complain, write

DESCRIPTION: Final = """\
Print the trend and noise of a run's loss, its gradient norms and its alarms,
and draw them; of several runs, report the ratio of their losses at equal steps.
"""
EPILOG: Final = """\
exit code: 0 no findings; 1 findings; 3 no findings, but some logs could not be
read or compared, or the picture could not be written.
"""


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
        help="the run to compare the others with (default: the first)",
    )
    parser.add_argument("--no-picture", action="store_true", help="print only")
    parser.add_argument(
        "--follow",
        nargs="?",
        type=float,
        const=5.0,
        metavar="SECONDS",
        help="read what is appended to the logs, every 5 s or so many, until Ctrl-C; needs rich",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Print the report and write the picture; what is wrong with one log or the picture hides nothing of the rest."""
    from hf_accum_fix.monitor.series import LogsError
    from hf_accum_fix.monitor.watch import within

    try:
        return _followed(arguments) if arguments.follow is not None else _watched(arguments)
    except LogsError as error:
        complain(within(f"hf-accum-fix watch: {error}"))
        return COULD_NOT_TELL


def _followed(arguments: argparse.Namespace) -> int:
    from hf_accum_fix.monitor.series import LogsError
    from hf_accum_fix.monitor.watch import follow, followable

    if not followable():
        raise LogsError("got --follow without rich; expected it installed; pip install rich, or omit --follow")
    if not arguments.follow > 0:
        raise LogsError(f"got --follow {arguments.follow:g}; expected seconds above zero")
    return follow(arguments.logs, arguments.against, arguments.follow).exit_code


def _watched(arguments: argparse.Namespace) -> int:
    from hf_accum_fix.monitor.run_logs import Logs
    from hf_accum_fix.monitor.series import LogsError, Run, printable
    from hf_accum_fix.monitor.watch import look, within
    from hf_accum_fix.progress import Progress

    progress, unread, runs = Progress(), list[str](), list[Run]()
    try:
        runs = Logs(progress.read).read_all(arguments.logs, unread)
        found = look(runs, arguments.against, unread, progress.say)
    finally:
        progress.end()
    write(within(found.words) + "\n")
    if arguments.no_picture:
        return found.exit_code
    from hf_accum_fix.monitor.picture import drawable, write_picture

    if not drawable():
        write(within('\nno picture: matplotlib is not installed; pip install "hf-accum-fix[recipes]"\n'))
        return found.exit_code
    try:
        write_picture(runs, arguments.output)
    except LogsError as error:
        complain(within(f"hf-accum-fix watch: {error}"))
        return found.exit_code or COULD_NOT_TELL
    write(within(f"\npicture: {printable(str(arguments.output))}\n"))
    return found.exit_code
