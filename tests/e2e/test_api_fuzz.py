"""Requests made from the OpenAPI document, good and bad: whatever comes, no 500, and errors in their one shape.

The suite tries a few of each operation; OUTRIDER_FUZZ_EXAMPLES makes it more.
"""

import contextlib
import os
from collections.abc import Callable

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

MAX_EXAMPLES = int(os.environ.get("OUTRIDER_FUZZ_EXAMPLES", "2"))
KEY = "operator"
GUARDED = (
    *(
        "/v1",
        "/inference",
        "/admin",
        "/tokenize",
        "/detokenize",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/reset_prefix_cache",
    ),
    *("/pause", "/resume", "/is_paused", "/update_weights", "/start_", "/finish_weight_update", "/weight_info"),
    *("/server_info", "/get_world_size", "/kv_event_sources"),
)


@pytest.fixture(scope="module")
def server(start_server, fixed_drafts, tmp_path_factory):
    """With tenants, so that all routes are there; sequences are short, so that valid requests are soon answered."""
    database = tmp_path_factory.mktemp("fuzz") / "outrider.db"
    return start_server(
        *("--database", f"sqlite:///{database}", "--admin-api-key", KEY, "--max-model-len", "64"),
        *("--max-num-queued-reqs", "64", "--log-level", "error"),
        *fixed_drafts,
    )


@pytest.fixture(scope="module")
def operations(server) -> list:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found = [found.ok() for found in document.get_all_operations()]
    return [
        operation for operation in found if operation.path not in ("/sleep", "/pause")
    ]  # nothing else would be answered after it


def each_case(operation, mode: GenerationMode, max_examples: int, use: Callable) -> None:
    """Call `use` with cases of an operation: `POSITIVE` ones fit the document, `NEGATIVE` ones do not."""

    @settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode))
    def run(case) -> None:
        use(case)

    run()


def check(operation, case, response) -> None:
    said = f"{operation.label}: {case.as_curl_command()}\n{response.status_code} {response.text[:2000]}"
    assert response.status_code != 500, said
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, said
        assert len(response.content) < 10_000, said


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_as_an_operator(server, operations, mode):
    answers: dict[str, list[int]] = {}
    headers = {"Authorization": f"Bearer {KEY}"}
    for operation in operations:

        def use(case, operation=operation) -> None:
            response = case.call(base_url=server.url, headers=headers, timeout=60)
            answers.setdefault(operation.label, []).append(response.status_code)
            check(operation, case, response)

        with contextlib.suppress(Unsatisfiable):  # nothing that can be sent to it is wrong
            each_case(operation, mode, MAX_EXAMPLES, use)
    print(f"{sum(map(len, answers.values()))} requests to {len(answers)} operations")
    assert len(answers) >= (len(operations) if mode is GenerationMode.POSITIVE else 10)
    refused = {status for statuses in answers.values() for status in statuses if status >= 400}
    assert {400, 404} <= refused


def test_guarded_routes_refuse_requests_without_a_key(server, operations):
    """Guarded routes stay guarded, whatever is sent."""
    for operation in operations:

        def use(case, operation=operation) -> None:
            response = case.call(base_url=server.url, timeout=60)
            check(operation, case, response)
            if operation.path.startswith(GUARDED):
                assert response.status_code == 401, operation.label

        each_case(operation, GenerationMode.POSITIVE, 2, use)


def test_all_routes_were_there_and_the_server_lives(server, operations):
    paths = {operation.path for operation in operations}
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/admin/v1/tenants", "/admin/v1/keys"} <= paths
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "All", "max_tokens": 2}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert "Traceback" not in server.output
