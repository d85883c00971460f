"""Progress lines of long work."""

import threading

from outrider.platform.core.progress import Progress, Stopwatch, duration


def test_a_status_line_follows_each_pause():
    lines: list[str] = []
    enough = threading.Event()

    def report(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            enough.set()

    with Progress(report, 0.01) as progress:
        progress.say("begins")
        progress.doing(lambda: "goes on")
        assert enough.wait(30)
    count = len(lines)
    assert lines[0] == "begins"
    assert set(lines[1:]) == {"goes on"}
    assert len(lines) == count, "nothing is said after the end"


def test_a_progress_bar_replaces_periodic_lines():
    lines: list[str] = []
    with Progress(lines.append, None) as progress:
        progress.say("begins")
    assert lines == ["begins"]


def test_durations():
    assert [duration(seconds) for seconds in (0.2, 40, 720, 12600)] == ["1 s", "40 s", "12 min", "3.5 h"]
    assert str(Stopwatch()) == "1 s"
