"""What takes longer than two seconds says how far it is: on a terminal in one line, else in plain lines."""

from __future__ import annotations

import io
import time

import pytest

from hf_accum_fix.progress import Progress


class Screen(io.StringIO):
    """What is written to a terminal, or to a file."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal  # type: ignore[method-assign]


@pytest.mark.parametrize("terminal", [True, False])
def test_what_takes_longer_than_two_seconds_is_told(terminal: bool) -> None:
    now = 0.0
    screen = Screen(terminal)
    progress = Progress(screen, lambda: now)
    for _ in range(19):
        now += 0.1
        progress.say("reading")
    assert not screen.getvalue()
    for place in range(200):
        now += 0.1
        progress.say(f"reading {place} of 200")
    progress.end()
    told = screen.getvalue()
    if terminal:
        assert "\n" not in told and 60 <= told.count("\rreading ") <= 100 and told.endswith(" \r")
    else:
        assert "\r" not in told and told.count("reading ") == 2
    assert max(map(len, told.replace("\r", "\n").splitlines())) < 80


def test_one_thing_that_takes_long_says_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is said meanwhile: a forward of a large model, say."""
    screen, started = Screen(terminal=False), time.monotonic()
    # A hundred times as fast.
    monkeypatch.setattr("hf_accum_fix.progress._LOOKS", 0.005)
    progress = Progress(screen, lambda: 100 * (time.monotonic() - started))
    progress.say("split 3 of 8")
    with progress.kept_up():
        time.sleep(0.4)
    lines = screen.getvalue().splitlines()
    assert 3 <= len(lines) <= 5 and all(line.startswith("split 3 of 8 (") for line in lines), lines
    assert int(lines[-1].split("(")[1].split()[0]) >= 20
