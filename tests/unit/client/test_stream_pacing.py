"""Consumers of many short steps are woken for several tokens at once; none waits for long, and nothing is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from outrider.platform.client import stream_pacing
from outrider.platform.client.stream_pacing import MAX_CORE_SHARE, MAX_INTERVAL, WAKE_UP_SECONDS, StreamPacer

MANY = 32
INTERVAL = MANY * WAKE_UP_SECONDS / MAX_CORE_SHARE


class Clock:
    """A loop's clock and timers that move on command."""

    def __init__(self, monkeypatch):
        self.now, self.timers = 100.0, []
        monkeypatch.setattr(stream_pacing.asyncio, "get_running_loop", lambda: self)

    def time(self):
        return self.now

    def call_later(self, seconds, call):
        timer = SimpleNamespace(at=self.now + seconds, call=call, cancel=lambda: self.timers.remove(timer))
        self.timers.append(timer)
        return timer

    def pass_time(self, seconds):
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.at <= self.now]:
            self.timers.remove(timer)
            timer.call()


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def open_all(count=MANY, shares_cores=True):
    pacer = StreamPacer()
    pacer.shares_cores = shares_cores
    return pacer, {f"r{i}": pacer.open(f"r{i}") for i in range(count)}


def step(pacer, names, finished=()):
    pacer.wake_all([SimpleNamespace(request_id=name, finished=name in finished) for name in names])


def woken(consumers, taking=True):
    """Names of the consumers woken since the last call; they take all tokens."""
    names = {name for name, consumer in consumers.items() if consumer.is_woken}
    for name in names if taking else ():
        consumers[name].taken()
    return names


def test_the_first_token_and_the_end_wake_at_once(clock):
    pacer, events = open_all()
    step(pacer, events)
    assert woken(events) == set(events)
    clock.pass_time(INTERVAL / 3)
    step(pacer, events, finished={"r3"})
    assert woken(events) == {"r3"}


def test_others_hear_of_several_tokens_at_once(clock):
    """Steps of two thirds of the interval: every other one wakes."""
    pacer, events = open_all()
    heard = []
    for _ in range(9):
        step(pacer, events)
        heard.append(woken(events) == set(events))
        clock.pass_time(INTERVAL * 2 / 3)
        assert not woken(events), "the next step comes before anybody has waited too long"
    assert heard == [True, False] * 4 + [True]
    assert len(clock.timers) == 0, "no consumer is held"


def test_no_consumer_waits_for_a_long_step(clock):
    pacer, events = open_all()
    step(pacer, events)
    woken(events)
    clock.pass_time(INTERVAL / 2)
    step(pacer, events)
    pacer.wake("r2")
    assert woken(events) == {"r2"}, "such as an abort"
    clock.pass_time(INTERVAL)
    assert woken(events) == set(events) - {"r2"}
    assert clock.timers == []


def test_a_slow_consumer_is_not_woken_for_tokens_it_has_taken(clock):
    """It takes late, and with the step that woke it the next one, for which the timer was to wake it."""
    pacer, events = open_all()
    step(pacer, events)
    assert woken(events, taking=False) == set(events)
    clock.pass_time(INTERVAL / 2)
    step(pacer, events)
    woken(events)
    clock.pass_time(INTERVAL)
    assert not woken(events)


def test_pacing_depends_on_consumers_woken_by_a_step(clock):
    """Not those that wait for their turn; and no stream waits long however many there are."""
    pacer, events = open_all(500)
    running = [f"r{i}" for i in range(8)]
    step(pacer, running)
    woken(events)
    clock.pass_time(8 * WAKE_UP_SECONDS / MAX_CORE_SHARE)
    step(pacer, running)
    assert woken(events) == set(running)
    step(pacer, events)
    assert woken(events) == set(events) - set(running)
    clock.pass_time(MAX_INTERVAL)
    assert woken(events) == set(running)


@pytest.mark.parametrize(("count", "shares_cores"), [(6, True), (1, True), (500, False)])
def test_few_consumers_or_a_remote_engine_need_no_pacing(clock, count, shares_cores):
    pacer, events = open_all(count, shares_cores)
    for _ in range(3):
        step(pacer, events)
        assert woken(events) == set(events)
        clock.pass_time(1e-5)


def test_a_finished_consumer_is_not_woken(clock):
    pacer, events = open_all()
    step(pacer, events)
    woken(events)
    step(pacer, [*events, "unknown"])
    pacer.wake("r1")  # it is aborted...
    other = pacer.open("r1")  # ...and another one has its id before it knows
    pacer.close("r1", events["r1"])
    pacer.close("r2", events.pop("r2"))
    clock.pass_time(2 * INTERVAL)
    assert woken(events) == set(events)
    assert not other.is_woken, "it has no token yet"
    assert len(pacer) == MANY - 1


def test_idle_when_all_are_gone(clock):
    pacer, events = open_all(2)
    assert not pacer.idle.is_set()
    for name, event in events.items():
        pacer.close(name, event)
    assert pacer.idle.is_set()
    assert len(pacer) == 0


def test_pacing_on_a_running_event_loop():
    async def main():
        pacer, events = open_all()
        step(pacer, events)
        woken(events)
        step(pacer, events)
        await asyncio.wait_for(events["r7"].wait(), 10)
        return woken(events)

    assert asyncio.run(main()) == {f"r{i}" for i in range(MANY)}
