"""A run's logs again and again, while it trains: a view that is kept up to date. The one file that needs rich.

follow([Path("output")])                         # until Ctrl-C
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from hf_accum_fix.monitor.run_logs import Logs
from hf_accum_fix.monitor.series import LogsError, Run
from hf_accum_fix.monitor.watch import Report, look, within


def followable() -> bool:
    """Whether rich is installed."""
    return find_spec("rich") is not None


def follow(
    paths: Sequence[Path], against: str | None = None, seconds: float = 5.0, sleep: Callable[[float], None] = time.sleep
) -> Report:
    """Show the report, and read what has been appended every so many seconds, until it is interrupted.

    Logs that are not there yet, or are being written, are waited for.

    Args:
        paths: as `read_runs` takes them.
        against: as in `look`.
        seconds: from one reading to the next.
        sleep: waits.

    Returns:
        The last complete reading.

    Raises:
        LogsError: if it is interrupted before any logs could be read.
    """
    found: Report | None = None
    logs, before = Logs(grow=True), list[Run]()
    unread_before: list[str] = []
    missing = LogsError("interrupted before the logs were read; expected one complete reading")
    try:
        from rich.live import Live
        from rich.text import Text

        with Live(Text("reading"), auto_refresh=False) as live:
            while True:
                try:
                    unread: list[str] = []
                    runs = logs.read_all(paths, unread)
                    # Runs whose logs have not grown are the same objects.
                    if found is None or [*map(id, runs)] != [*map(id, before)] or unread != unread_before:
                        found = look(runs, against, unread)
                    before, unread_before = runs, unread
                    shown = within(found.words)
                except LogsError as error:
                    missing = error
                    shown = within(f"waiting: {error}")
                shown = f"{shown}\n\n{time.strftime('%H:%M:%S')}, every {seconds:g} s; Ctrl-C ends"
                live.update(Text(shown), refresh=True)
                sleep(seconds)
    except KeyboardInterrupt:
        if found is None:
            raise missing from None
        return found
