"""Requests that were refused after they had been written down."""

import pytest

from outrider.platform.tenancy.ledger.journal import Journal

from .test_journal import BYTES, found, reopened, row


@pytest.mark.parametrize("crashes", [1, 2])
def test_refused_rows_stay_refused_when_segments_change(tmp_path, crashes):
    """The line that says so may be in another segment, and no longer needed there."""
    journal = Journal(tmp_path / "journal", BYTES)
    journal.begin(row("silent"))
    journal.begin(row("dropped"))
    journal._rotate(BYTES // 8)
    journal.drop("dropped")
    journal._rotate(BYTES // 8)  # deletes what is not needed
    for _ in range(crashes):
        journal = reopened(journal)
        assert found(journal).keys() == {"silent"}
    journal.forget(["silent"])
    assert len(journal._segments) == 1, "nothing is left to be denied"
    journal.close()
