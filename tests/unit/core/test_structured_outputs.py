"""Constraints on the form of an answer: those accepted, and those refused by name."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from outrider import InvalidRequestError, OutriderError, SamplingParams, StructuredOutputsParams
from outrider.platform.core.constraint_check import CHECKER, ConstraintChecker
from outrider.platform.core.structured_outputs import MAX_CHOICES, MAX_CONSTRAINT_CHARS


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"json": '{"type": "array"}'},
        {"json": True},
        {"json_object": True},
        {"regex": r"\d{4}"},
        {"choice": ["yes", 'a "quoted" text', "mit Ümlaut"]},
        {"grammar": 'start: "a" | "b"'},
        {"grammar": 'root ::= "a" | "b"'},
        {
            "structural_tag": {
                "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
                "triggers": ["<f"],
            }
        },
        {"json_object": True, "disable_any_whitespace": True},
        {"json_object": True, "whitespace_pattern": " ?"},
    ],
)
def test_constraints_that_are_served(fields):
    CHECKER.check(StructuredOutputsParams(**fields))
    assert SamplingParams(structured_outputs=fields).structured_outputs == StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "exactly one of json, regex"),
        ({"json": {}, "regex": "a"}, "json, regex"),
        ({"json": {"type": "object", "uniqueItems": True, "if": {}}}, "if"),
        ({"json": {"type": "strng"}}, "strng"),
        ({"json": {"$ref": "http://example.com/schema"}}, "example.com"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"json": "{"}, "json"),
        ({"json": "[1]"}, "JSON schema"),
        ({"json": False}, "allows anything"),
        ({"json": {"a": object()}}, "json"),
        ({"json": 3}, "json must be a text"),
        ({"regex": "("}, "unclosed"),
        ({"regex": "a" * (MAX_CONSTRAINT_CHARS + 1)}, str(MAX_CONSTRAINT_CHARS)),
        ({"regex": "\ud800"}, "Unicode"),
        ({"choice": []}, "not empty"),
        ({"choice": ["a", 3]}, "list of texts"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, str(MAX_CHOICES)),
        ({"choice": ["a" * 100] * 700}, str(MAX_CONSTRAINT_CHARS)),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"structural_tag": {"type": "structural_tag", "format": {}}}, "structures"),
        ({"structural_tag": {"structures": [{"begin": "<f>"}], "triggers": ["<f"]}}, "structural_tag"),
        ({"structural_tag": '"text"'}, "structural_tag"),
        ({"json_object": False}, "none"),
    ],
)
def test_constraints_that_are_refused_by_name(fields, named):
    with pytest.raises(InvalidRequestError, match=f"(?s)structured_outputs.*{named}") as caught:
        CHECKER.check(StructuredOutputsParams(**fields))
    assert caught.value.param == "structured_outputs"
    assert len(caught.value.message) < 700


def test_unknown_fields_get_a_suggestion():
    with pytest.raises(InvalidRequestError, match="regex"):
        SamplingParams(structured_outputs={"regx": "a"})
    with pytest.raises(InvalidRequestError, match="must be an object"):
        SamplingParams(structured_outputs="a+")


def test_a_request_is_copied_with_its_constraint():
    params = SamplingParams(structured_outputs={"choice": ["a"]})
    assert params.clone(n=2).structured_outputs == params.structured_outputs
    assert params.edits_logits
    assert params.edits_read_tokens


def test_properties_that_are_not_named():
    open_ended = StructuredOutputsParams(json={"type": "object", "properties": {"a": {}}})
    closed = StructuredOutputsParams(json=open_ended.json, disable_additional_properties=True)
    assert closed.key != open_ended.key
    assert '"additionalProperties": false' in closed.grammar_text()
    assert '"additionalProperties": false' not in open_ended.grammar_text()


def test_rules_within_rules_do_not_end_the_process():
    rules = "\n".join(f"a{index}: ((((a{index + 1}))))" for index in range(2500))
    CHECKER.check(StructuredOutputsParams(grammar=f'start: a0\n{rules}\na2500: "x"'))


@pytest.mark.slow
def test_a_constraint_that_takes_too_long_is_refused_and_the_next_is_checked():
    patterns = [{"type": "string", "pattern": f"(.*a.{{{index}}})+"} for index in range(40)]
    for _ in range(2):  # the second answer is remembered
        with pytest.raises(InvalidRequestError, match=r"structured_outputs: too complex; .* more than 1.5 s"):
            CHECKER.check(StructuredOutputsParams(json={"allOf": patterns}))
    CHECKER.check(StructuredOutputsParams(regex="fine"))


@pytest.mark.slow
def test_a_checking_process_that_was_killed_is_started_again():
    checker = ConstraintChecker()
    checker.check(StructuredOutputsParams(regex="a"))
    checker._process.kill()
    checker._process.wait()
    checker.check(StructuredOutputsParams(regex="b"))
    os.kill(checker._process.pid, signal.SIGSTOP)
    killer = threading.Timer(0.1, checker.interrupt)
    killer.start()
    checker.check(StructuredOutputsParams(regex="c"))
    killer.join()


def test_a_check_that_is_interrupted_leaves_no_answer_for_the_next_one():
    checker = ConstraintChecker()
    checker.check(StructuredOutputsParams(regex="a"))
    pid = checker._process.pid
    os.kill(pid, signal.SIGSTOP)

    def check_and_be_interrupted():
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        checker.check(StructuredOutputsParams(regex="("))

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            check_and_be_interrupted()
    finally:
        signal.signal(signal.SIGALRM, before)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    checker.check(StructuredOutputsParams(regex="b"))


FORKED = """
import os, signal
from outrider.platform.core.constraint_check import ConstraintChecker
from outrider.platform.core.structured_outputs import StructuredOutputsParams
checker = ConstraintChecker()
checker.check(StructuredOutputsParams(regex="a"))
parents = checker._process.pid
with checker._lock:  # as when another thread checks at that moment
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # when it hangs
        checker.check(StructuredOutputsParams(regex="b"))
        assert checker._process.pid != parents
        os._exit(0)
assert os.waitpid(child, 0)[1] == 0
checker.check(StructuredOutputsParams(regex="c"))
assert checker._process.pid == parents
"""


def test_a_forked_process_checks_by_itself():
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], timeout=100).returncode == 0


def test_the_checker_has_the_parents_import_path_and_its_failures_are_503(tmp_path, monkeypatch):
    (tmp_path / "llguidance.py").write_text("raise SystemExit(7)")
    checker = ConstraintChecker()
    with monkeypatch.context() as changed:
        changed.syspath_prepend(tmp_path)
        with pytest.raises(OutriderError, match="status 7"):
            checker.check(StructuredOutputsParams(regex="a"))
    checker.check(StructuredOutputsParams(regex="a"))
