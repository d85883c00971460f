"""Routes that answer without a key: those of the list, and no other."""

import asyncio
import re
from types import SimpleNamespace

import httpx
import pytest
from fastapi import routing
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute

from outrider.platform.http.admin.admin_routes import router as admin_router
from outrider.platform.http.app import create_app
from outrider.platform.http.protect.open_routes import OPEN_FOLDERS, OPEN_PATHS
from outrider.platform.http.server_config import ServerConfig

KEY = {"Authorization": "Bearer k"}


@pytest.fixture
def keyed(make_http):
    return make_http(api_keys=("k",))


def registered(http) -> set[tuple[str, str]]:
    """(method, path) of every route of the application, and of those that a server with tenants has."""
    http.app.include_router(admin_router)
    routes = getattr(routing, "iter_route_contexts", iter)(http.app.routes)  # newer FastAPIs keep routers apart
    return {(method, route.path) for route in routes for method in route.methods or ("GET",)}


def concrete(path: str) -> str:
    return re.sub(r"\{(\w+)(:path)?\}", "x", path)


def test_every_route_without_an_entry_is_closed(keyed):
    routes = registered(keyed)
    assert len(routes) > 50
    open_now = {path for method, path in routes if keyed.request(method, concrete(path)).status_code != 401}
    assert open_now == {*OPEN_PATHS, "/console/assets/{version}/{name:path}"}
    wrong = {
        path for method, path in routes if keyed.get(concrete(path), headers={"X-Api-Key": "no"}).status_code != 401
    }
    assert wrong == open_now


def test_no_entry_is_left_of_a_route_that_is_gone(keyed):
    paths = {path for _, path in registered(keyed)}
    assert paths >= OPEN_PATHS
    assert all(any(path.startswith(folder) for path in paths) for folder in OPEN_FOLDERS)


@pytest.mark.parametrize(
    "path", ["/new", "/health/deep", "/healthz", "/metricsx", "/console/new", "/v2/new", "/mounted/health"]
)
def test_a_new_route_is_closed(keyed, path):
    async def answer(request):
        return PlainTextResponse("secret")

    inner = [Route("/health", answer)]
    keyed.app.router.routes += [
        Mount("/mounted", routes=inner),
        Route(path, answer, methods=["GET", "POST", "OPTIONS"]),
    ]
    for method in ("GET", "HEAD", "POST", "OPTIONS", "DELETE"):
        assert keyed.request(method, path).status_code == 401
    assert keyed.get(path, headers=KEY).text == "secret"


@pytest.mark.parametrize(
    "path",
    [
        *("//v1/models", "/v1/models/", "/v1//models", "/%76%31/models", "/v1%2Fmodels", "/./v1/models", "/V1/models"),
        *("/health/../v1/models", "/health%2F..%2Fv1%2Fmodels", "/console/../v1/models", "/metrics;/v1/models"),
        *("/console/assets", "/console/assetsx/y", "/tokenizer_info", "/is_sleeping", "/nowhere", "/favicon.ico"),
    ],
)
def test_no_spelling_of_a_path_gets_past_the_gate(keyed, path):
    for method in ("GET", "HEAD", "POST", "OPTIONS"):
        assert keyed.request(method, path).status_code == 401, method


@pytest.mark.parametrize("path", ["//health", "/health/", "/%68ealth", "/health?x=/v1"])
def test_open_routes_stay_open_however_they_are_written(keyed, path):
    assert [keyed.request(method, path).status_code for method in ("GET", "HEAD")] == [200, 200]


def test_unknown_paths_are_404_with_a_key_and_without_keys(keyed, make_http):
    assert keyed.get("/nowhere").json()["error"]["code"] == "invalid_api_key"
    assert keyed.get("/nowhere", headers=KEY).status_code == 404
    assert make_http().get("/nowhere").status_code == 404


def test_authentication_and_router_agree_on_paths_below_the_root_path(keyed):
    async def send(path):
        transport = httpx.ASGITransport(keyed.app, root_path="/outer")
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get(path)).status_code

    paths = ("/outer/health", "/outer/v1/models", "/outer/nowhere", "/health")
    assert [asyncio.run(send(path)) for path in paths] == [200, 401, 401, 200]


def test_a_websocket_is_closed(llm):
    """Also one whose route somebody has added."""
    app = create_app(llm, ServerConfig(api_keys=("k",)))
    reached, sent = [], []

    async def endpoint(websocket):
        reached.append(websocket)

    app.router.routes.append(WebSocketRoute("/health", endpoint))
    scope = {"type": "websocket", "path": "/health", "headers": [], "query_string": b"", "subprotocols": []}

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert reached == []
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_with_tenants_metrics_are_open_to_admins_alone(llm):
    directory = SimpleNamespace(authenticate=lambda key: None)
    tenancy = SimpleNamespace(directory=directory, limiter=SimpleNamespace(queue=SimpleNamespace()))
    app = create_app(llm, ServerConfig(), tenancy=tenancy)

    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get("/metrics")

    answer = asyncio.run(send())
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
