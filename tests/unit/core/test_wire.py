"""Framing of messages between processes."""

import io
import os
import socket
import threading

import pytest

from outrider.platform.core.wire import MAX_BYTES, pack, read, receive, receive_into, send


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("size", [0, 10, 65_528, 65_536, 3_000_000])
def test_messages_of_any_length_arrive_whole(pair, size):
    message = {"text": "ü\udcff" + "x" * size, "numbers": [1, 2**62, -1], "none": None}
    thread = threading.Thread(target=send, args=(pair[0], message))
    thread.start()
    got, descriptors = receive(pair[1])
    thread.join()
    assert (got, descriptors) == (message, [])


def test_messages_one_after_another(pair):
    for number in range(3):
        send(pair[0], [number])
    assert [receive(pair[1])[0] for _ in range(3)] == [[0], [1], [2]]


def test_a_descriptor_comes_with_its_message_and_is_not_inherited(pair):
    memory = os.memfd_create("test")
    os.write(memory, b"content")
    send(pair[0], {}, memory)
    os.close(memory)
    _, (descriptor,) = receive(pair[1])
    assert os.pread(descriptor, 100, 0) == b"content"
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("sent", [b"", b"\x08", b"\x08" + bytes(7) + b'{"a"'])
def test_an_end_within_a_message(pair, sent):
    """And all descriptors that came with it are closed."""
    memory = os.memfd_create("test")
    if sent:
        socket.send_fds(pair[0], [sent], [memory])
    os.close(memory)
    pair[0].close()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EOFError):
        receive(pair[1])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_missing_answer_times_out(pair):
    pair[0].settimeout(0.01)
    with pytest.raises(TimeoutError):
        receive(pair[0])


def test_bytes_after_a_message(pair):
    send(pair[0], [7])
    pair[0].sendall(b"abc")
    pair[0].close()
    assert receive(pair[1])[0] == [7]
    buffer = bytearray(3)
    receive_into(pair[1], memoryview(buffer))
    assert buffer == b"abc"
    with pytest.raises(EOFError):
        receive_into(pair[1], memoryview(buffer))


def test_messages_of_a_pipe():
    stream = io.BytesIO(pack(b"one") + pack(b"") + pack(b"three")[:-1])
    assert [read(stream), read(stream)] == [b"one", b""]
    for _ in range(2):  # within a message, and at the end
        with pytest.raises(EOFError):
            read(stream)


def test_a_message_length_above_the_limit_is_refused(pair):
    header = (MAX_BYTES + 1).to_bytes(8, "little")
    pair[0].sendall(header)
    with pytest.raises(OSError, match="is announced"):
        receive(pair[1])
    with pytest.raises(OSError, match="is announced"):
        read(io.BytesIO(header))
