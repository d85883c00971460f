"""Profiles of several engines, and of a process that ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.platform.core.errors import InvalidRequestError, InvalidUserInputError
from outrider.platform.engine.profiler import Profiler


def test_one_profile_at_a_time_in_a_process(tmp_path: Path) -> None:
    first, second = Profiler(), Profiler()
    first.start(str(tmp_path), "first")
    for profiler in (first, second):
        with pytest.raises(InvalidUserInputError, match="already in this process"):
            profiler.start(str(tmp_path), "")
    assert Path(first.stop()).stat().st_size
    second.start(str(tmp_path), "")
    second.close()
    with pytest.raises(InvalidUserInputError, match="no profile"):
        second.stop()


@pytest.mark.parametrize("prefix", ["a/b", "a\0b"])
def test_prefixes_that_no_file_has(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(InvalidRequestError, match="prefix"):
        Profiler().start(str(tmp_path), prefix)


@pytest.mark.slow
def test_a_process_may_end_while_it_records(tmp_path: Path) -> None:
    script = f"from outrider.platform.engine.profiler import Profiler; Profiler().start({str(tmp_path)!r}, '')"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=100).returncode == 0
