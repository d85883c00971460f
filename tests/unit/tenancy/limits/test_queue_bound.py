"""Each waiting request of a server is counted once, and never refused after it was queued."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.platform.core.errors import InvalidRequestError, OverloadedError
from outrider.platform.tenancy.limits.queue_bound import Bounds, QueueBound


def bound(most=2, seats=3) -> QueueBound:
    return QueueBound(lambda: Bounds(most, seats))


def test_tenants_queues_and_the_engine_share_one_bound():
    queue = bound()
    with queue.enter_engine(3), queue.wait_for_slots(1):
        assert queue.num_waiting == 1
        with queue.enter_engine(1):
            assert queue.num_waiting == 2
            for for_slots in (True, False):
                with pytest.raises(OverloadedError, match=r"2 sequences wait already.*max_num_queued_reqs is 2"):
                    queue.check(1, for_slots=for_slots)
        queue.check(1, for_slots=True)
    assert (queue.num_waiting, queue.num_in_engine, queue.num_for_slots) == (0, 0, 0)


def test_free_seats_are_granted_while_others_wait_for_slots():
    queue = bound()
    with queue.wait_for_slots(2), queue.enter_engine(3), pytest.raises(OverloadedError):
        queue.check(1)


def test_several_sequences_are_admitted_together_or_not_at_all():
    queue = bound()
    with queue.enter_engine(4):
        with pytest.raises(OverloadedError):
            queue.check(2)
        queue.check(1)


def test_more_than_there_will_ever_be_room_for():
    with pytest.raises(InvalidRequestError, match=r"6 sequences.*3 at once.*2 wait") as caught:
        bound().check(6)
    assert caught.value.param == "n"


def test_without_a_bound_all_may_wait():
    queue = QueueBound(lambda: Bounds(None, 1))
    with queue.enter_engine(1000), queue.wait_for_slots(1000):
        queue.check(5000)
        assert queue.num_waiting == 1999


def test_sequences_that_finish_before_their_siblings_leave_the_queue():
    queue = bound()
    with queue.enter_engine(4) as leave:
        leave(2)
        assert queue.num_in_engine == 2
    assert queue.num_in_engine == 0


@given(
    most=st.integers(0, 4),
    seats=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["come", "wait", "granted", "end"]), st.integers(1, 3)), max_size=60),
)
def test_the_bound_holds_and_transfers_are_never_refused(most, seats, steps):
    queue = bound(most, seats)
    waiting, running = [], []
    for kind, count in steps:
        if kind == "end" and running:
            running.pop().__exit__(None, None, None)
        elif kind == "granted" and waiting:  # as when a tenant's limit is lifted: at any moment
            count, slot = waiting.pop(0)
            slot.__exit__(None, None, None)
            running.append(queue.enter_engine(count))
            running[-1].__enter__()
        elif kind in ("come", "wait"):
            try:
                queue.check(count, for_slots=kind == "wait")
            except (OverloadedError, InvalidRequestError):
                continue
            if kind == "wait":
                waiting.append((count, queue.wait_for_slots(count)))
                waiting[-1][1].__enter__()
            else:
                running.append(queue.enter_engine(count))
                running[-1].__enter__()
        assert queue.num_waiting <= most
