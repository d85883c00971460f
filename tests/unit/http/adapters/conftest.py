"""Tenants in front of a server with adapters of their own and shared ones."""

from types import SimpleNamespace

import pytest

from outrider.platform.http.app import create_app
from outrider.platform.http.server_config import ServerConfig
from outrider.platform.tenancy.accounts.principal import Limits, Principal

INFERENCE = frozenset({"inference"})
PEOPLE = {
    "acme": Principal(tenant="acme", scopes=INFERENCE, max_adapters=2),
    "globex": Principal(tenant="globex", scopes=INFERENCE, max_adapters=2),
    "poor": Principal(tenant="poor", scopes=INFERENCE),
    "picky": Principal(tenant="acme", scopes=INFERENCE, max_adapters=2, key_limits=Limits(allowed_adapters=("sql",))),
    "bound": Principal(
        tenant="globex", scopes=INFERENCE, max_adapters=2, tenant_limits=Limits(allowed_adapters=("sql",))
    ),
    "admin": Principal(tenant="ops"),
    "helper": Principal(tenant="ops", key_limits=Limits(allowed_adapters=("acme/own", "sql"))),
    "operator": Principal(),
}


class People:
    def authenticate(self, key):
        return PEOPLE.get(key)


class Client:
    """The calls of one key."""

    def __init__(self, http, key):
        self._http, self._headers = http, {"Authorization": f"Bearer {key}"}

    def get(self, path):
        return self._http.get(path, headers=self._headers)

    def post(self, path, body):
        return self._http.post(path, body, headers=self._headers)

    def load(self, name, path="x", **extra):
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **extra})

    def unload(self, name, **extra):
        return self.post("/v1/unload_lora_adapter", {"lora_name": name, **extra})

    def use(self, model, **extra):
        return self.post("/v1/completions", {"model": model, "prompt": "x", **extra})

    def names(self):
        return [card["id"] for card in self.get("/v1/models").json()["data"]]


@pytest.fixture
def root(tmp_path):
    for tenant in ("acme", "globex"):
        for name in ("x", "y", "z"):
            (tmp_path / tenant / name).mkdir(parents=True)
            (tmp_path / tenant / name / "adapter_config.json").write_text("{}")
    (tmp_path / "shared").mkdir()
    return tmp_path


@pytest.fixture
def people(http, llm, root):
    """Clients by key, in front of a server with one root for adapters, and the shared adapters "sql" and "support"."""
    config = ServerConfig(served_model_names=("base",), lora_roots=(str(root),))
    http.app = create_app(llm, config, authenticator=People())
    http.app.state.serving.has_tenant = ("acme", "globex", "poor", "ops").__contains__
    people = SimpleNamespace(**{key: Client(http, key) for key in PEOPLE}, llm=llm, http=http)
    for name in ("sql", "support"):
        assert people.operator.load(name, str(root / "shared")).status_code == 200
    return people


def used(people, who, model, **extra):
    response = getattr(people, who).use(model, **extra)
    assert response.status_code == 200, response.text
    return people.llm.calls[-1]["lora_request"], response.json()["model"]
