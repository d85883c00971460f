"""Masks of grammars on logits, made in a bounded time: tokens that do not fit are -inf, and no others change."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outrider.platform.engine.sampling.grammar_masks import mask_logits
from outrider.platform.engine.sampling.mask_threads import NUM_THREADS, MaskJob, MaskThreads


class State:
    """State of a sequence whose masks are given, or take `seconds`."""

    def __init__(self, threads, given=(), seconds=0.0):
        self.threads = threads
        self.grammar = SimpleNamespace(lock=threading.Lock())
        self.is_busy = self.is_deferred = False
        self.num_deferred, self.seconds, self.problem = 0, seconds, ""
        self._given, self._ready, self._release = given, [], threading.Event()

    def fill(self, tokens, drafts, deadline):
        if self.seconds:
            self._release.wait(5)
        self._ready = list(self._given)

    def masks(self, tokens, drafts):
        return self._ready

    def release(self):
        self._release.set()
        while self.is_busy:
            time.sleep(0.001)


@pytest.fixture
def threads():
    made = MaskThreads()
    yield made
    made.close()


def make_row(state, place, drafts=()):
    request = SimpleNamespace(grammar=state, tokens=[1, 2], num_prompt_tokens=1)
    return SimpleNamespace(request=request, num_drafts=len(drafts), drafts=(drafts,), place=place, is_draft=False)


@pytest.mark.parametrize("size", [7, 64, 1003])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_masks(threads, size, share):
    allowed = np.random.default_rng(size).random((3, size)) < share
    state = State(threads, np.packbits(allowed, axis=1, bitorder="little"))
    first = make_row(state, 4)
    rows = [first, make_row(state, 0, (5,)), make_row(state, 2, (5, 6))]
    for row in rows:
        row.request = first.request
    before = torch.randn(5, size)
    after = before.clone()
    mask_logits(after, rows)
    expected = before.clone()
    for row, of_row in zip(rows, allowed, strict=True):
        expected[row.place, torch.from_numpy(~of_row)] = float("-inf")
    assert torch.equal(after, expected)
    assert not state.is_deferred


def test_a_slow_grammar_delays_no_other_request(threads):
    everything = [np.full(2, 255, np.uint8)]
    slow, quick = State(threads, everything, seconds=1.0), State(threads, everything)
    logits = torch.zeros(2, 16)
    mask_logits(logits, [make_row(slow, 0), make_row(quick, 1)])
    assert (slow.is_deferred, quick.is_deferred) == (True, False)
    assert logits[0].isinf().all()
    assert not logits[1].isinf().any()
    mask_logits(logits, [make_row(slow, 0)])
    assert slow.num_deferred == 2
    slow.release()
    mask_logits(logits := torch.zeros(2, 16), [make_row(slow, 0)])
    assert (slow.is_deferred, slow.num_deferred) == (False, 0)
    assert not logits[0].isinf().any()


def test_stuck_threads_are_bounded_and_jobs_that_never_started_do_not_run_later(threads):
    stuck = [State(threads, seconds=1.0) for _ in range(NUM_THREADS)]
    for state in stuck:
        threads.run([MaskJob(state, lambda _, state=state: state.fill([], [], 0.0))], 0.01)
    assert all(state.is_busy for state in stuck)
    ran = []
    late = State(threads)
    threads.run([MaskJob(late, ran.append)], 0.01)
    for state in stuck:
        state.release()
    threads.run([MaskJob(State(threads), lambda _: None)], 5.0)
    assert not ran
    assert not late.is_busy


def test_an_error_of_one_grammar_fails_its_sequence_alone(threads):
    failed = []
    broken, sound = State(threads), State(threads)
    broken.fail = failed.append
    jobs = [MaskJob(broken, lambda _: 1 // 0), MaskJob(sound, lambda _: "made")]
    threads.run(jobs, 5.0)
    assert failed
    assert jobs[1].result == "made"
    assert not broken.is_busy
