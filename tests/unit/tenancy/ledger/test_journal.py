"""The journal: written rows are found again after any fault of the process, the disk or the file."""

import contextlib
import errno
import os
import shutil

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.tenancy.ledger.journal import GROWTH_BYTES, Journal, JournalError
from outrider.platform.tenancy.ledger.usage_row import UsageRow, row_from_json, row_to_json

BYTES = 1 << 20


def row(name="r1", **fields) -> UsageRow:
    fixed = {"tenant": "acme", "endpoint": "/v1/completions", "received_at": 1.5, "finished_at": 1.5}
    return UsageRow(request_id=name, **(fixed | fields))


def ended(name="r1", **fields) -> UsageRow:
    return row(name, **({"status": "stop", "output_tokens": 7, "finished_at": 2.5} | fields))


def crash(journal: Journal) -> None:
    """As `kill -9` does: files and lock are let go, nothing is tidied up."""
    journal._let_go()


def reopened(journal: Journal, **options) -> Journal:
    crash(journal)
    return Journal(journal.folder, options.get("max_bytes", journal.max_bytes))


def found(journal: Journal) -> dict[str, UsageRow]:
    return {row.request_id: row for row in journal.recovered.rows}


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal", BYTES)


def test_the_last_state_of_each_request_is_found(journal):
    journal.begin(row("begun"))
    journal.begin(row("running"))
    journal.update(row("running", output_tokens=3, finished_at=2.0))
    journal.begin(row("ended"))
    journal.end(ended("ended"))
    journal.begin(row("dropped"))
    journal.drop("dropped")
    again = reopened(journal)
    assert found(again) == {
        "begun": row("begun"),
        "running": row("running", output_tokens=3, finished_at=2.0),
        "ended": ended("ended"),
    }
    assert found(again)["begun"].status == "lost"
    assert again.recovered.num_damaged == 0
    assert found(reopened(again)) == found(again), "it is found until it is forgotten"


def test_an_orderly_end_leaves_nothing(journal):
    journal.begin(row())
    journal.end(ended())
    journal.forget(["r1"])
    journal.close()
    assert os.listdir(journal.folder) == ["lock"]


def test_a_journal_that_is_closed_with_rows_keeps_them(journal):
    journal.begin(row())
    journal.end(ended())
    journal.close()
    assert found(Journal(journal.folder, BYTES)) == {"r1": ended()}


def test_one_process_at_a_time(journal):
    with pytest.raises(InvalidRequestError, match="another server uses") as caught:
        Journal(journal.folder, BYTES)
    assert caught.value.param == "journal"
    journal.begin(row())
    assert found(reopened(journal)) == {"r1": row()}, "the attempt has taken nothing away"


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match="cannot use"):
        Journal(tmp_path / "file", BYTES)


def test_files_are_readable_by_the_owner_alone(journal):
    assert journal.folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in journal.folder.iterdir())


# --- damage ---


def test_cut_at_every_byte(journal, tmp_path):
    """Whatever part of a segment is left, each request's last whole line counts."""
    states = [row("a"), row("b"), ended("b"), ended("a")]
    journal.begin(states[0])
    journal.begin(states[1])
    journal.end(states[2])
    journal.end(states[3])
    crash(journal)
    (segment,) = journal.folder.glob("*.journal")
    content = segment.read_bytes().rstrip(b"\0")
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    assert len(ends) == len(states)
    for zeros, step in ((0, 1), (100, 7)):  # the file ends there, or the rest of it is space that was reserved
        for cut in range(0, len(content) + 1, step):
            folder = tmp_path / f"{zeros}-{cut}"
            folder.mkdir()
            (folder / segment.name).write_bytes(content[:cut] + b"\0" * zeros)
            again = Journal(folder, BYTES)
            # The newline itself carries nothing.
            whole = {state.request_id: state for state, end in zip(states, ends, strict=True) if end - 1 <= cut}
            assert found(again) == whole
            assert again.recovered.num_damaged == (cut not in (0, *ends, *(end - 1 for end in ends)))
            crash(again)
            shutil.rmtree(folder)


@settings(max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_byte_costs_its_line_alone(tmp_path_factory, data):
    journal = Journal(tmp_path_factory.mktemp("journal"), BYTES)
    names = ["a", "b", "c"]
    for name in names:
        journal.begin(row(name))
    crash(journal)
    (segment,) = journal.folder.glob("*.journal")
    content = bytearray(segment.read_bytes().rstrip(b"\0"))
    position = data.draw(st.integers(0, len(content) - 1))
    was_newline = content[position] == ord("\n")  # without it two lines are one
    content[position] ^= data.draw(st.integers(1, 255))
    segment.write_bytes(content)
    again = Journal(journal.folder, BYTES)
    assert found(again).items() <= {name: row(name) for name in names}.items(), "read as what it was not"
    assert len(found(again)) >= len(names) - (2 if was_newline else 1)
    crash(again)


def test_a_page_that_never_reached_the_disk(journal):
    for name in "abc":
        journal.begin(row(name))
    crash(journal)
    (segment,) = journal.folder.glob("*.journal")
    content = bytearray(segment.read_bytes())
    start = content.index(b"\n") + 1
    end = content.index(b"\n", start) + 1
    content[start:end] = b"\0" * (end - start)
    segment.write_bytes(content)
    assert set(found(Journal(journal.folder, BYTES))) == {"a", "c"}


def test_lines_of_another_version(journal):
    """Unknown fields are left out, missing ones have their defaults, and nonsense is no row."""
    assert row_from_json(row_to_json(ended())[:-1] + b',"invented":[1]}') == ended()
    for content in (b"[]", b"{}", b'{"request_id":"x"}', row_to_json(row()).replace(b"1.5", b'"x"', 1)):
        with pytest.raises(ValueError, match=r"."):
            row_from_json(content)


@given(st.text(max_size=300), st.integers(0, 2**31 - 1), st.none() | st.floats(0, 4e9))
def test_rows_survive_json(text, number, time):
    original = row(client_request_id=text, model=text, output_tokens=number, first_token_at=time)
    copy = row_from_json(row_to_json(original))
    clean = {name: value for name, value in original.values().items() if name != "model"}
    assert {name: value for name, value in copy.values().items() if name != "model"} == clean
    assert "\0" not in copy.model
    copy.model.encode()  # databases take it
    assert len(copy.client_request_id) <= 256


# --- room ---


def fill(journal) -> list[str]:
    """Begin requests until there is no more room; their ids."""
    names = []
    with contextlib.suppress(JournalError):
        while True:
            journal.begin(row(f"r{len(names)}"))
            names.append(f"r{len(names)}")
    return names


def sync(journal) -> None:  # as the ledger does
    if journal.needs_sync:
        journal.sync()()
        journal.delete_dead()


def on_disk(journal) -> int:
    return sum(path.stat().st_size for path in journal.folder.glob("*.journal"))


def test_the_journal_is_bounded_and_begun_requests_can_end(journal):
    names = fill(journal)
    assert len(names) > 300
    assert on_disk(journal) == journal.num_bytes <= BYTES
    assert "full" in journal.problem()
    longest = {"client_request_id": "", "adapter_digest": "f" * 64, "error_type": "E" * 64, "first_token_at": 1.0 / 3}
    counts = {f"{name}_tokens": 10**9 for name in ("prompt", "cached", "output", "drafted", "accepted")}
    for name in names:
        journal.end(ended(name, finished_at=1e10 / 3, **longest, **counts))
    assert on_disk(journal) <= BYTES
    assert len(found(reopened(journal))) == len(names)


def test_the_growth_of_a_line_is_bounded():
    last = msgspec.structs.replace(
        row(), adapter_digest="f" * 64, error_type="E" * 64, first_token_at=1e10 / 3, finished_at=1e10 / 3,
        status="length", prompt_tokens=2**31, cached_tokens=2**31, output_tokens=2**31, drafted_tokens=2**31,
        accepted_tokens=2**31,
    )  # fmt: skip
    assert len(row_to_json(last)) - len(row_to_json(row())) < GROWTH_BYTES


def test_forgetting_makes_room_again(journal):
    names = fill(journal)
    journal.forget(names)
    assert journal.problem() is None
    assert len(fill(journal)) > len(names) / 2


def test_one_silent_request_does_not_keep_the_journal_from_shrinking(journal):
    journal.begin(row("silent"))
    for number in range(10_000):
        journal.begin(row(f"r{number}"))
        journal.end(ended(f"r{number}"))
        journal.forget([f"r{number}"])
        sync(journal)
    assert journal.num_requests == 1
    assert journal.num_bytes <= BYTES // 2 + BYTES // 8
    assert found(reopened(journal))["silent"] == row("silent")


def test_leftovers_of_an_outage_are_compacted(journal):
    """Rows that wait for the database take their last line alone; several of each would fill the journal sooner."""
    count = written = 0
    with contextlib.suppress(JournalError):
        while True:
            states = [row(f"r{count}"), *(row(f"r{count}", output_tokens=n) for n in range(3)), ended(f"r{count}")]
            journal.begin(states[0])
            for state in states[1:4]:
                journal.update(state)
            journal.end(states[4])
            written += sum(len(row_to_json(state)) for state in states)
            count += 1
            sync(journal)
    assert written > 2 * BYTES
    assert all(state.status == "stop" for state in found(reopened(journal)).values())


def test_a_bound_below_the_present_size(journal):
    names = fill(journal)
    again = reopened(journal, max_bytes=BYTES // 4)
    assert len(found(again)) == len(names)
    assert len(fill(again)) < len(names) / 4, "the rest of one segment"
    again.forget(names)
    again.begin(row("new"))


# --- a disk that fails ---


def test_a_full_disk_refuses_new_requests_and_keeps_the_ends_of_others(journal, monkeypatch):
    journal.begin(row("running"))

    def no_space(fd, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    fill(journal)
    with pytest.raises(JournalError, match="No space left"):
        journal.begin(row("new"))
    assert "No space left" in journal.problem()
    journal.end(ended("running"))
    assert len(list(journal.folder.glob("*.journal"))) == 1, "half a segment is left behind"
    monkeypatch.undo()
    assert journal.problem() is None
    assert found(reopened(journal))["running"] == ended("running")


def test_a_segment_that_cannot_be_written_is_left_for_another(journal, monkeypatch):
    journal.begin(row("a"))
    write, broken = os.pwrite, journal._segments[-1].fd

    def fails(fd, data, offset):
        if fd == broken:
            raise OSError(errno.EIO, "Input/output error")
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", fails)
    journal.end(ended("a"))
    journal.begin(row("b"))
    assert found(reopened(journal)) == {"a": ended("a"), "b": row("b")}


def test_no_segment_can_be_written(journal, monkeypatch):
    journal.begin(row("a"))

    def fails(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fails)
    journal.update(row("a", output_tokens=3))  # not worth an error
    with pytest.raises(JournalError, match="Input/output"):
        journal.end(ended("a"))
    with pytest.raises(JournalError):
        journal.begin(row("b"))
    monkeypatch.undo()
    journal.begin(row("b"))
    journal.end(ended("a"))
    assert found(reopened(journal)) == {"a": ended("a"), "b": row("b")}


def test_sync_reaches_every_segment_that_was_written_to(journal, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    while len(journal._segments) < 3:
        name = f"r{journal.num_requests}"
        journal.begin(row(name))
        journal.end(ended(name))
    work = journal.sync()
    journal.forget(list(journal._states))  # deletes the files, while another thread has them in hand
    work()
    assert len(synced) == 3
    synced.clear()
    journal.sync()()
    assert synced == []


def test_a_sync_that_fails_is_due_again(journal, monkeypatch):
    journal.begin(row())

    def fails(fd):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fails)
    with pytest.raises(OSError, match="Input/output"):
        journal.sync()()
    monkeypatch.undo()
    assert journal._segments[-1].is_dirty
    journal.sync()()
    assert not journal._segments[-1].is_dirty


STEPS = st.lists(st.tuples(st.sampled_from(["begin", "update", "end", "forget", "drop", "crash"]), st.integers(0, 9)))


@settings(max_examples=80)
@given(steps=STEPS)
def test_journal_equals_a_dictionary_after_any_steps(tmp_path_factory, steps):
    """Against a dictionary. Rows that were forgotten may come back after a crash: the database has them."""
    journal = Journal(tmp_path_factory.mktemp("journal"), 1 << 15)  # segments of 4 KiB: many
    states, gone = {}, {}
    for kind, number in steps:
        name = f"r{number}"
        running = states.get(name) is not None and states[name].status == "lost"
        try:
            if kind == "begin" and name not in states and name not in gone:
                journal.begin(row(name))
                states[name] = row(name)
            elif kind == "update" and running:
                state = row(name, output_tokens=states[name].output_tokens + 1)
                journal.update(state)
                states[name] = state
            elif kind == "end" and running:
                journal.end(ended(name))
                states[name] = ended(name)
            elif kind == "forget" and name in states and not running:
                journal.forget([name])
                gone[name] = states.pop(name)
            elif kind == "drop" and running:
                journal.drop(name)
                gone[name] = states.pop(name)
        except JournalError:
            assert kind == "begin"
        if kind == "crash":
            journal = reopened(journal)
            assert set(states) <= set(found(journal)) <= set(states) | set(gone)
            for request_id, state in found(journal).items():
                assert request_id in gone or state == states[request_id]
            journal.forget(set(found(journal)) - set(states))
        assert journal.num_requests == len(states)
        assert journal._reserved == sum(state.reserved for state in journal._states.values())
        assert journal._segments[-1].free >= journal._reserved
        assert [s.num_live for s in journal._segments] == [
            sum(state.segment is segment for state in journal._states.values()) for segment in journal._segments
        ]
    crash(journal)
