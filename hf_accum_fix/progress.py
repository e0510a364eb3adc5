"""What takes longer than two seconds says how far it is: on a terminal in one line, else in plain lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

#: Seconds before anything is said, and from one saying to the next on a terminal and elsewhere.
_SILENT, _ON_A_TERMINAL, _ELSEWHERE = 2.0, 0.2, 10.0
_COLUMNS = 79
#: Seconds from one look at the clock to the next, while one thing takes long.
_LOOKS = 0.5


class Progress:
    """Says on stderr what is being done.

    Args:
        stream: where; None: stderr.
        clock: seconds.
        listened: whether anything is said.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        listened: bool = True,
    ) -> None:
        self._stream, self._clock = stream or sys.stderr, clock
        self._due, self._line = clock() + _SILENT if listened else float("inf"), ""
        self._doing, self._since, self._lock = "", 0.0, threading.Lock()

    def say(self, doing: str) -> None:
        """What is being done now; said if it is time."""
        now = self._clock()
        with self._lock:
            self._doing, self._since = doing, now
            self._say(doing, now)

    def _say(self, doing: str, now: float) -> None:
        if now < self._due:
            return
        terminal = self._stream.isatty()
        self._due = now + (_ON_A_TERMINAL if terminal else _ELSEWHERE)
        doing = doing if len(doing) <= _COLUMNS else f"...{doing[3 - _COLUMNS :]}"
        self._write(f"\r{doing:{len(self._line)}}" if terminal else f"{doing}\n")
        self._line = doing if terminal else ""

    @contextmanager
    def kept_up(self) -> Iterator[None]:
        """Say also how long one thing takes, while it does; then take the line away."""
        done = threading.Event()

        def repeat() -> None:
            while not done.wait(_LOOKS):
                now = self._clock()
                with self._lock:
                    if self._doing:
                        self._say(f"{self._doing} ({now - self._since:.0f} s)", now)

        thread = threading.Thread(target=repeat, name="hf_accum_fix-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.end()

    def end(self) -> None:
        """Take the line away."""
        if self._line:
            self._write(f"\r{'':{len(self._line)}}\r")
            self._line = ""

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._due = float("inf")  # Nobody listens.
