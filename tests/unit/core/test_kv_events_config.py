"""`kv_events_config`: vLLM's fields, their limits, and the addresses of ranks."""

from __future__ import annotations

import pytest

from outrider.platform.core.config import EngineArgs, check_args
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.kv_events import MAX_RANK, MAX_TOPIC, parse_kv_events

ON = {"enable_kv_cache_events": True}


@pytest.mark.parametrize("config", [None, {}, {"enable_kv_cache_events": False}, {"publisher": "null"}])
def test_off(config):
    assert parse_kv_events(config) is None


@pytest.mark.parametrize(
    "config", [{"enable_kv_cache_events": False, "publisher": "zmq"}, ON | {"publisher": "null", "topic": None}]
)
def test_off_with_other_fields(config):
    assert parse_kv_events(config) is None


def test_defaults_are_those_of_vllm():
    config = parse_kv_events(ON)
    assert (config.endpoint, config.replay_endpoint, config.topic) == ("tcp://*:5557", None, "")
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)


LARGEST = {"buffer_steps": 1_000_000, "hwm": 1_000_000, "max_queue_size": 1_000_000}


@pytest.mark.parametrize(("name", "most"), LARGEST.items())
def test_limits_of_numbers(name, most):
    assert getattr(parse_kv_events(ON | {name: most}), name) == most
    for wrong in (most + 1, -1, 1.5, True, "1"):
        with pytest.raises(InvalidRequestError, match=f"kv_events_config: {name}") as error:
            parse_kv_events(ON | {name: wrong})
        assert error.value.param == "kv_events_config"


def test_the_longest_topic():
    assert parse_kv_events(ON | {"topic": "é" * (MAX_TOPIC // 2)}).topic
    with pytest.raises(InvalidRequestError, match=f"topic must have at most {MAX_TOPIC} bytes"):
        parse_kv_events(ON | {"topic": "é" * (MAX_TOPIC // 2) + "e"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "must be an object"),
        ({"enable_kv_cache_event": True}, "unknown field 'enable_kv_cache_event'; did you mean"),
        ({1: 2}, "unknown field 1"),
        ({"publisher": "zmq"}, "enable_kv_cache_events is missing"),
        (ON | {"publisher": "nats"}, "publisher must be one of zmq, null"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events must be true or false"),
        (ON | {"topic": "\ud800"}, "topic is not valid Unicode"),
        *((ON | {"endpoint": wrong}, "endpoint must be tcp://HOST:PORT") for wrong in (
            "", "*:5557", "tcp://*", "tcp://:5557", "tcp://*:port", "tcp://*:-1", "tcp://*:" + "9" * 5000, "ipc://",
            "http://x:1", "udp://*:5557",
        )),
        (ON | {"endpoint": "tcp://*:65536"}, "a port is at most 65535"),
        (ON | {"replay_endpoint": ""}, "replay_endpoint must be tcp://HOST:PORT"),
    ],
)  # fmt: skip
def test_wrong_configs_are_refused_by_name(config, message):
    with pytest.raises(InvalidRequestError, match=message):
        check_args(EngineArgs(kv_events_config=config))


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", "tcp://*:5560"),
        ("tcp://[::]:5557", "tcp://[::]:5560"),
        ("tcp://*:0", "tcp://*:0"),
        ("ipc:///tmp/events", "ipc:///tmp/events_dp3"),
        ("inproc://events", "inproc://events_dp3"),
    ],
)
def test_each_rank_has_an_address_of_its_own(endpoint, expected):
    config = parse_kv_events(ON | {"endpoint": endpoint, "replay_endpoint": endpoint}, 3)
    assert (config.endpoint, config.replay_endpoint) == (expected, expected)


def test_the_largest_rank():
    endpoint = f"tcp://*:{65535 - MAX_RANK}"
    assert parse_kv_events(ON | {"endpoint": endpoint}, MAX_RANK).endpoint == "tcp://*:65535"
    check_args(EngineArgs(kv_events_config=ON | {"endpoint": endpoint}, data_parallel_rank=MAX_RANK))
    with pytest.raises(InvalidRequestError, match=f"data_parallel_rank {MAX_RANK}: a port is at most"):
        check_args(EngineArgs(kv_events_config=ON | {"endpoint": "tcp://*:65000"}, data_parallel_rank=MAX_RANK))
    with pytest.raises(InvalidRequestError, match="data_parallel_rank"):
        check_args(EngineArgs(data_parallel_rank=MAX_RANK + 1))


def test_events_need_the_prefix_cache():
    with pytest.raises(InvalidRequestError, match="needs enable_prefix_caching"):
        check_args(EngineArgs(kv_events_config=ON, enable_prefix_caching=False))
    check_args(EngineArgs(kv_events_config={"publisher": "null"}, enable_prefix_caching=False))
