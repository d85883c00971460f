"""A real `outrider serve` process with the demo model."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

from outrider.models.demo import demo_eagle3_path

START_SECONDS = 120  # generous: the tests' machine may be busy; how fast a start is, is measured elsewhere


class ServerProcess:
    """`outrider serve` on a free port, with its output."""

    def __init__(
        self,
        *arguments: str,
        tethered: Callable[..., list[str]],
        program: str = "outrider.platform.cli.main",
        **variables: str,
    ) -> None:
        """`variables`: of its environment. `program`: a module that runs the same command, changed by a test."""
        command = tethered([sys.executable, "-m", program, "serve", "--port", "0", *arguments])
        # One thread: the demo model is small, and threads that wait for each other crawl on a machine that is busy.
        keys = ("OUTRIDER_API_KEY", "OUTRIDER_ADMIN_API_KEY", "OUTRIDER_DATABASE")
        # Adapters are read in a thread: the tests of the reader process have their own, and `server` has one.
        own = {"OMP_NUM_THREADS": "1", "OUTRIDER_LORA_READER": "0", **variables}
        environment = {k: v for k, v in os.environ.items() if k not in keys} | own
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.url = ""
        self._output: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._output.append(line)
                self._news.notify_all()
        with self._news:
            self._output.append("")
            self._news.notify_all()

    @property
    def output(self) -> str:
        return "".join(self._output)

    def wait_until_ready(self) -> None:
        with self._news:
            self._news.wait_for(lambda: " is ready on " in self.output or self._output[-1:] == [""], START_SECONDS)
        ready = re.search(r"Outrider is ready on (http://\S+) \(started in [\d.]+ s\)", self.output)
        assert ready is not None, self.output
        self.url = ready[1]

    def http(self, **options) -> httpx.Client:
        """A client that reads no certificates, which takes longer than most requests."""
        return httpx.Client(base_url=self.url, timeout=60, verify=False, **options)

    def client(self, api_key: str = "none") -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60, http_client=http)

    def _engines(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "engine_process" in " ".join(child.cmdline())]

    def has_engine(self) -> bool:
        return bool(self._engines())

    def engine(self) -> psutil.Process:
        """The engine's process."""
        (engine,) = self._engines()
        return engine

    def metric(self, name: str, **labels: str) -> float:
        """The sum over the samples of that name that have these labels."""
        total = 0.0
        with self.http() as http:
            answer = http.get("/metrics").raise_for_status()
        for line in answer.text.splitlines():
            if re.match(rf"outrider:{name}(\{{|\s)", line) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def wait_for(self, condition, seconds: float = 60) -> None:
        """Poll until `condition` is true; connections that fail count as not yet."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"it did not happen in {seconds} s; the server said:\n{self.output}")

    def begin_stop(self) -> None:
        """SIGTERM."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.begin_stop()
        try:
            return self.process.wait(60)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self._reader.join(10)


@pytest.fixture(scope="session")
def start_shared(tethered) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers, which end with the session at the latest."""
    started: list[ServerProcess] = []

    def start(
        *arguments: str, ready: bool = True, program: str = "outrider.platform.cli.main", **variables: str
    ) -> ServerProcess:
        started.append(ServerProcess(*arguments, tethered=tethered, program=program, **variables))
        if ready:
            started[-1].wait_until_ready()
        return started[-1]

    yield start
    for server in started:  # all at once
        server.begin_stop()
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def start_server(start_shared) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers, which get SIGTERM at the end of the module: an idle one takes a 200th of a core."""
    started: list[ServerProcess] = []

    def start(*arguments: str, **options: Any) -> ServerProcess:
        started.append(start_shared(*arguments, **options))
        return started[-1]

    yield start
    for server in started:
        server.begin_stop()


FIXED_DRAFTS = json.dumps({"method": "eagle3", "model": str(demo_eagle3_path()), "num_speculative_tokens": 4})
"""A number of drafts that does not depend on how busy the machine is."""


@pytest.fixture(scope="session")
def server(start_shared, tmp_path_factory) -> ServerProcess:
    """The demo model and its adapters; others may be loaded from the tests' own folders. Shared by all tests: leave it
    as it was."""
    options = ["--speculative-config", FIXED_DRAFTS, "--lora-root", str(tmp_path_factory.getbasetemp())]
    return start_shared(*options, OUTRIDER_LORA_READER="1")


TOOLS_TEMPLATE = """{{- bos_token }}{% if tools %}{{ '<|system|>\\n' + tools | tojson + '<|end|>\\n' }}{% endif %}
{%- for m in messages %}
    {%- set calls = (m.tool_calls | tojson) if m.tool_calls else '' %}
    {{- '<|' + ('user' if m.role == 'tool' else m.role) + '|>\\n' + m.content + calls + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
KEY = "sk-ant-test"


@pytest.fixture(scope="session")
def tools_server(start_shared, tmp_path_factory) -> ServerProcess:
    """The demo model with a chat template that writes tools and their calls, behind `api_key`."""
    template = tmp_path_factory.mktemp("tools") / "template.jinja"
    template.write_text(TOOLS_TEMPLATE)
    return start_shared("--api-key", KEY, "--chat-template", str(template), "--speculative-config", FIXED_DRAFTS)


@pytest.fixture(scope="session")
def api_key() -> str:
    """The API key of `tools_server`."""
    return KEY


@pytest.fixture(scope="session")
def fixed_drafts() -> list[str]:
    """Options for a server that always drafts."""
    return ["--speculative-config", FIXED_DRAFTS]


@pytest.fixture(scope="session")
def client(server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="session")
def http(server) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http
