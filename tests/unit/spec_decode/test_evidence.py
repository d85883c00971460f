"""Notes of what steps told: in order, once, and not without bound."""

from outrider.spec_decode import evidence
from outrider.spec_decode.evidence import Evidence


def test_notes_are_taken_in_once_and_in_order():
    told, notes = [], Evidence()
    notes.note(lambda *args: told.append(("a", args)), 1, 2)
    notes.note(lambda *args: told.append(("b", args)))
    assert told == []
    notes.take_in()
    notes.take_in()
    assert told == [("a", (1, 2)), ("b", ())]


def test_what_is_noted_while_notes_are_taken_in_comes_next():
    told, notes = [], Evidence()
    notes.note(lambda: notes.note(told.append, "later"))
    notes.take_in()
    assert told == []
    notes.take_in()
    assert told == ["later"]


def test_notes_are_bounded_where_nobody_decides(monkeypatch):
    monkeypatch.setattr(evidence, "_MOST", 5)
    told, notes = [], Evidence()
    for number in range(12):
        notes.note(told.append, number)
    assert told == list(range(10))
