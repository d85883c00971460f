"""Ranks as actors on a Ray of this machine: the text of one process, deaths, and what is freed. `make test-ray`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

pytest.importorskip("ray")

import ray

from outrider import LLM, SamplingParams
from outrider.platform.cli.main import main
from outrider.platform.core.errors import EngineDeadError, InvalidRequestError
from outrider.platform.engine.executor import ray_launch

from ..rank_tests import RankTests, expected, whole  # noqa: F401  (fixtures)
from ..rank_texts import NUM_BLOCKS, OPTIONS, PROMPTS

RAY = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
CORES = 2.0


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=int(CORES), include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def llm(expected: list[str]) -> Iterator[LLM]:  # noqa: F811
    handler = signal.getsignal(signal.SIGTERM)
    with LLM(num_gpu_blocks_override=NUM_BLOCKS, **RAY, **OPTIONS) as made:
        assert signal.getsignal(signal.SIGTERM) is handler
        assert len(actors()) == 1
        yield made
    wait_until_free()


def actors() -> list[psutil.Process]:
    """Processes of ranks on this process's cluster."""
    return [process for process in psutil.Process().children(recursive=True) if "ray::RankActor" in process.name()]


def wait_until_free() -> None:
    ends = time.monotonic() + 30
    while actors() or ray.available_resources().get("CPU") != CORES:
        assert time.monotonic() < ends, (actors(), ray.available_resources())
        time.sleep(0.1)
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} == {"REMOVED"}


def test_ranks_of_replicas_are_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sys.exit(main(["deploy", "-tp", "2", "--distributed-executor-backend", "ray"]) or None)
    assert "argument --distributed-executor-backend: outrider deploy has the ranks" in capsys.readouterr().err


def test_a_dead_actor_ends_the_engine_and_frees_its_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over IPv6, if the machine has it."""
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        monkeypatch.setattr(ray_launch, "THIS_MACHINE", "::1")
    with LLM(dtype="float32", device="cpu", max_model_len=256, **RAY) as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
        (actor,) = actors()
        os.kill(actor.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1 of 2 is gone \(ActorDied"):
            llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
        wait_until_free()
        with pytest.raises(EngineDeadError, match="rank 1 of 2 is gone"):
            llm.llm_engine.engine_core.step()


class TestTexts(RankTests):
    """See `RankTests`."""


def test_ranks_that_the_cluster_has_no_room_for() -> None:
    with pytest.raises(InvalidRequestError, match=r"needs 4 CPU of Ray's cluster, which has 2") as caught:
        LLM(**{**RAY, "tensor_parallel_size": 4}, device="cpu")
    assert caught.value.param == "tensor_parallel_size"
