"""Consumers of many short steps are told of several tokens at once; nobody waits for long, and nothing is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from outrider.platform.client import stream_pacing
from outrider.platform.client.stream_pacing import MOST_SECONDS, PIECE_SECONDS, SHARE, News

MANY = 32
INTERVAL = MANY * PIECE_SECONDS / SHARE


class Clock:
    """A loop's clock and timers that move when told."""

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
    news = News()
    news.shares_cores = shares_cores
    return news, {f"r{i}": news.open(f"r{i}") for i in range(count)}


def tell(news, names, finished=()):
    news.tell_all([SimpleNamespace(request_id=name, finished=name in finished) for name in names])


def told(consumers, taking=True):
    """Those that have been told since the last call; they take what there is."""
    names = {name for name, consumer in consumers.items() if consumer._event.is_set()}
    for name in names if taking else ():
        consumers[name].taken()
    return names


def test_the_first_token_and_the_end_are_told_at_once(clock):
    news, events = open_all()
    tell(news, events)
    assert told(events) == set(events)
    clock.pass_time(INTERVAL / 3)
    tell(news, events, finished={"r3"})
    assert told(events) == {"r3"}


def test_others_hear_of_several_tokens_at_once(clock):
    """Steps of two thirds of the interval: every other one is told."""
    news, events = open_all()
    heard = []
    for _ in range(9):
        tell(news, events)
        heard.append(told(events) == set(events))
        clock.pass_time(INTERVAL * 2 / 3)
        assert not told(events), "the next step comes before anybody has waited too long"
    assert heard == [True, False] * 4 + [True]
    assert len(clock.timers) == 0, "nobody is held"


def test_nobody_waits_for_a_step_that_takes_long(clock):
    news, events = open_all()
    tell(news, events)
    told(events)
    clock.pass_time(INTERVAL / 2)
    tell(news, events)
    news.tell("r2")
    assert told(events) == {"r2"}, "such as an abort"
    clock.pass_time(INTERVAL)
    assert told(events) == set(events) - {"r2"}
    assert clock.timers == []


def test_a_slow_consumer_is_not_told_of_what_it_has_taken(clock):
    """It takes late, and with the step that it was told of the next one, of which it was to be told by the timer."""
    news, events = open_all()
    tell(news, events)
    assert told(events, taking=False) == set(events)
    clock.pass_time(INTERVAL / 2)
    tell(news, events)
    told(events)
    clock.pass_time(INTERVAL)
    assert not told(events)


def test_what_counts_is_how_many_a_step_tells(clock):
    """Not those that wait for their turn; and no stream waits long however many there are."""
    news, events = open_all(500)
    running = [f"r{i}" for i in range(8)]
    tell(news, running)
    told(events)
    clock.pass_time(8 * PIECE_SECONDS / SHARE)
    tell(news, running)
    assert told(events) == set(running)
    tell(news, events)
    assert told(events) == set(events) - set(running)
    clock.pass_time(MOST_SECONDS)
    assert told(events) == set(running)


@pytest.mark.parametrize(("count", "shares_cores"), [(6, True), (1, True), (500, False)])
def test_few_consumers_or_an_engine_elsewhere_hold_nobody(clock, count, shares_cores):
    news, events = open_all(count, shares_cores)
    for _ in range(3):
        tell(news, events)
        assert told(events) == set(events)
        clock.pass_time(1e-5)


def test_one_that_has_gone_is_not_told(clock):
    news, events = open_all()
    tell(news, events)
    told(events)
    tell(news, [*events, "unknown"])
    news.tell("r1")  # it is aborted...
    other = news.open("r1")  # ...and another one has its id before it knows
    news.close("r1", events["r1"])
    news.close("r2", events.pop("r2"))
    clock.pass_time(2 * INTERVAL)
    assert told(events) == set(events)
    assert not other._event.is_set(), "it has no token yet"
    assert len(news) == MANY - 1


def test_idle_when_all_are_gone(clock):
    news, events = open_all(2)
    assert not news.idle.is_set()
    for name, event in events.items():
        news.close(name, event)
    assert news.idle.is_set()
    assert len(news) == 0


def test_with_a_real_loop():
    async def main():
        news, events = open_all()
        tell(news, events)
        told(events)
        tell(news, events)
        await asyncio.wait_for(events["r7"].wait(), 10)
        return told(events)

    assert asyncio.run(main()) == {f"r{i}" for i in range(MANY)}
