"""A tenant's own adapters: rights to list, use, load and unload them, and their names."""

import asyncio
from dataclasses import replace

import pytest

from outrider.platform.core.adapter_names import MARK, engine_name
from outrider.platform.core.errors import AdapterError, InvalidUserInputError
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.messages import AdapterInfo
from outrider.platform.http.app import create_app
from outrider.platform.http.server_config import ServerConfig

from ....error_answers import error_in
from .conftest import PEOPLE, People, used

# --- names ------------------------------------------------------------------------------------------------------------


def test_two_tenants_may_each_have_one_of_the_same_name(people, root):
    assert people.acme.load("support").text == "Success: LoRA adapter 'support' added successfully."
    assert people.globex.load("support", "y").status_code == 200
    for who, folder in (("acme", "x"), ("globex", "y")):
        lora, model = used(people, who, "support")
        assert (lora.name, lora.path) == (engine_name(who, "support"), str(root / who / folder))
        assert model == "support"
        assert used(people, who, "base:support")[0] == lora
    lora, _ = used(people, "poor", "support")
    assert lora.name == "support", "the others have the shared one"
    assert len(people.llm.in_engine) == 4


def test_a_template_of_a_tenants_own_adapter_is_not_trusted(people, root):
    for folder in (root / "acme" / "x", root / "shared"):
        (folder / "chat_template.jinja").write_text("own ")
    assert people.acme.load("support").status_code == 200
    for model, prompt in (("support", "u:hi|a:"), ("sql", "own u:hi|a:")):
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        response = people.acme.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        assert people.llm.tokenizer.decode(people.llm.calls[-1]["prompt"]["prompt_token_ids"]) == prompt


def test_the_engines_name_is_no_name_for_anybody(people):
    people.acme.load("own")
    for who in PEOPLE:
        client = getattr(people, who)
        for name in (engine_name("acme", "own"), f"base:{engine_name('acme', 'own')}", f"{MARK}acme{MARK}own:0.5"):
            error_in(client.use(name), 404)
        error_in(client.use("base", adapters=[engine_name("acme", "own")]), 404)
    for call, status in (("unload", 404), ("load", 400)):
        error_in(getattr(people.operator, call)(engine_name("acme", "own")), status)
    for path in ("/v1/pin_lora_adapter", "/v1/unpin_lora_adapter"):
        error_in(people.operator.post(path, {"lora_name": engine_name("acme", "own")}), 404)
    assert engine_name("acme", "own") in people.llm.in_engine


def test_lists(people):
    people.acme.load("support")
    people.acme.load("own", "y")
    people.globex.load("secret")
    assert people.acme.names() == ["base", "sql", "support", "own"]
    assert people.globex.names() == ["base", "sql", "support", "secret"]
    assert people.poor.names() == ["base", "sql", "support"]
    everything = ["base", "sql", "support", "acme/support", "acme/own", "globex/secret"]
    assert people.admin.names() == people.operator.names() == everything
    card = people.acme.get("/v1/models/support").json()
    assert (card["root"], card["parent"], card["tenant"]) == ("x", "base", "acme")
    assert "tenant" not in people.poor.get("/v1/models/support").json()
    assert people.operator.get("/v1/models/acme/own").json()["tenant"] == "acme"


def test_admins_use_any_by_tenant_and_name(people):
    people.acme.load("own")
    assert used(people, "admin", "acme/own")[0].name == engine_name("acme", "own")
    assert used(people, "operator", "acme/own:0.5+sql")[0].label == f"{engine_name('acme', 'own')}+sql"
    error_in(people.acme.use("acme/own"), 404)
    error_in(people.admin.use("acme/nothing"), 404)


def test_mixes_have_visible_parts_and_plain_names(people):
    people.acme.load("own")
    people.globex.load("secret")
    lora, model = used(people, "acme", "base", adapters=[{"name": "own", "weight": 0.5}, "sql"])
    assert model == "own:0.5+sql:1.0"
    assert {part.request.name for part in lora.parts} == {engine_name("acme", "own"), "sql"}
    for body in ({"model": "own+secret"}, {"model": "base", "adapters": ["own", "secret"]}, {"model": "+secret:0.5"}):
        error_in(people.acme.post("/v1/completions", {"prompt": "x", **body}), 404)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_another_tenants_adapter_is_answered_as_unknown(people, route):
    people.globex.load("secret")
    body = {
        "/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [65]},
    }[route]  # fmt: skip

    def answer(name):
        response = people.acme.post(route, body | {"model": name})
        return response.status_code, response.text.replace("secret", "NAME").replace("nobody", "NAME")

    for foreign, unknown in (("secret", "nobody"), ("globex/secret", "globex/nobody"), ("+secret:0.5", "+nobody:0.5")):
        assert answer(foreign) == answer(unknown)
        assert answer(foreign)[0] == 404


def test_cards_and_unloading_treat_other_tenants_adapters_as_unknown(people):
    people.globex.load("secret")
    calls = len(people.llm.calls)
    answers = []
    for name in ("secret", "nobody"):
        card, unload = people.acme.get(f"/v1/models/{name}"), people.acme.unload(name)
        answers.append([(r.status_code, r.text.replace(name, "NAME")) for r in (card, unload)])
    assert answers[0] == answers[1]
    assert {status for status, _ in answers[0]} == {404}
    asked = [call["unload"] for call in people.llm.calls[calls:]]
    assert asked == [engine_name("acme", "secret"), engine_name("acme", "nobody")], "the engine does the same for both"
    assert people.globex.names()[-1] == "secret"


def test_a_name_that_another_tenant_has_is_free(people):
    people.globex.load("secret")
    assert people.acme.load("secret").status_code == 200
    assert "already" in error_in(people.acme.load("secret"), 400)["message"]


def test_cards_of_shared_adapters_hide_other_tenants_requests(people):
    people.llm.in_engine["sql"] = replace(people.llm.in_engine["sql"], num_running=3, num_waiting=1)
    card = people.acme.get("/v1/models/sql").json()
    assert not card.keys() & {"num_running", "num_waiting", "tier", "rows", "load_seconds"}
    assert card["rank"] == 8
    assert people.operator.get("/v1/models/sql").json()["num_running"] == 3
    people.acme.load("own")
    assert people.acme.get("/v1/models/own").json()["num_running"] == 0


def test_cards_for_an_admins_key_with_limits(people):
    """Which call another tenant's adapter by its full name."""
    people.acme.load("own")
    people.globex.load("own")
    assert people.helper.get("/v1/models/acme/own").json()["id"] == "acme/own"
    assert people.helper.get("/v1/models/globex/own").status_code == 404
    assert people.helper.names() == ["base", "sql", "acme/own"]


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_keys_list_holds_for_all_names(people):
    people.acme.load("own")
    assert people.picky.names() == ["base", "sql"]
    used(people, "picky", "sql")
    used(people, "picky", "base")
    for name in ("own", "support"):
        unknown = people.picky.use("nobody").text
        assert people.picky.use(name).text == unknown.replace("nobody", name)
        error_in(people.picky.unload(name), 404)
    assert error_in(people.picky.load("other"), 403)["param"] == "lora_name"
    assert people.picky.load("sql").status_code == 200


def test_a_tenants_list_is_about_shared_ones(people):
    assert people.bound.load("own").status_code == 200
    assert people.bound.names() == ["base", "sql", "own"]
    used(people, "bound", "own")
    error_in(people.bound.use("support"), 404)
    error_in(people.bound.use("support+sql"), 404)


def test_max_adapters(people):
    assert people.acme.load("a").status_code == 200
    assert people.acme.load("b", "y").status_code == 200
    error = error_in(people.acme.load("c", "z"), 400)
    assert (error["type"], error["param"]) == ("InvalidUserInput", "lora_name")
    assert "2 adapters" in error["message"]
    assert people.acme.load("b", "z", load_inplace=True).status_code == 200
    assert people.acme.unload("a").text == "Success: LoRA adapter 'a' removed successfully."
    assert people.acme.load("c", "z").status_code == 200
    assert people.operator.load("d", tenant="acme", path="/nowhere/else").status_code == 400
    assert people.globex.load("a").status_code == 200


def test_max_adapters_counts_loads_that_are_in_flight(people):
    models = people.http.app.state.serving.models
    with models.room_for("a", "acme", 2), models.room_for("a", "acme", 2), models.room_for("b", "acme", 2):
        with pytest.raises(InvalidUserInputError, match="at most 2"), models.room_for("c", "acme", 2):
            pass
        with models.room_for("c", "globex", 1):
            pass
    with models.room_for("c", "acme", 1):
        pass


# --- rights -----------------------------------------------------------------------------------------------------------


def test_loads_need_the_scope_and_pins_an_admin(people):
    assert error_in(people.poor.load("x"), 403)["type"] == "PermissionDeniedError"
    error_in(people.poor.unload("sql"), 403)
    assert error_in(people.acme.load("x", pinned=True), 403)["param"] == "pinned"
    for path in ("/v1/pin_lora_adapter", "/v1/unpin_lora_adapter"):
        error_in(people.acme.post(path, {"lora_name": "sql"}), 403)
    error_in(people.acme.unload("sql"), 404)
    assert "sql" in people.poor.names()


def test_only_admins_name_tenants(people):
    for tenant in ("globex", "nobody", ""):
        answers = [people.acme.load("x", tenant=tenant), people.acme.unload("x", tenant=tenant)]
        assert [(r.status_code, r.json()["error"]["param"]) for r in answers] == [(403, "tenant")] * 2
    assert people.acme.load("x", tenant="acme").status_code == 200
    assert error_in(people.operator.load("x", tenant="nobody"), 404)["param"] == "tenant"


def test_an_admin_acts_for_a_tenant(people, root):
    folder = str(root / "globex" / "y")
    assert people.operator.load("given", folder, tenant="acme", pinned=True).status_code == 200
    assert used(people, "acme", "given")[0].path == folder
    assert people.acme.get("/v1/models/given").json()["pinned"] is True
    response = people.admin.post("/v1/unpin_lora_adapter", {"lora_name": "given", "tenant": "acme"})
    assert response.text == "Success: LoRA adapter 'given' unpinned successfully."
    assert people.acme.get("/v1/models/given").json()["pinned"] is False
    error_in(people.admin.unload("given"), 404)
    assert people.admin.unload("given", tenant="acme").status_code == 200
    assert "given" not in people.acme.names()


def test_a_servers_own_tenant_field_needs_tenants(http):
    response = http.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x", "tenant": "acme"})
    assert error_in(response, 404)["param"] == "tenant"


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["x", "./x", "../acme/x", "{root}/acme/x"])
def test_a_tenant_loads_from_its_own_folder(people, root, path):
    assert people.acme.load("a", path.format(root=root)).status_code == 200
    assert people.llm.adapters.requests[engine_name("acme", "a")].path == str(root / "acme" / "x")


@pytest.mark.parametrize(
    "path",
    [
        "../globex/x", "../globex/nothing", "../nobody", "{root}/globex/x", "{root}/shared", "/etc", "link", "link/x",
        "hf://org/name", "s3://bucket/x", "file:///etc", "http://169.254.169.254/x", "a\0b", "..", "/" + "a" * 4000,
    ],
)  # fmt: skip
def test_a_path_outside_a_tenants_folder_is_refused(people, root, path):
    (root / "acme" / "link").symlink_to(root / "globex")
    calls = len(people.llm.in_engine)
    path = path.format(root=root)
    for field in ("lora_path", "draft_path"):
        extra = {"path": "x", "draft_path": path} if field == "draft_path" else {"path": path}
        error = error_in(people.acme.load("a", **extra), 400)
        assert (error["type"], error["param"]) == ("InvalidAdapter", field)
        assert "outside this tenant's folder" in error["message"]
        assert len(error["message"]) < 400
    assert len(people.llm.in_engine) == calls


def test_without_a_root_tenants_load_nothing(make_http, people):
    config = ServerConfig(served_model_names=("base",))
    people.http.app = create_app(people.llm, config, authenticator=People())
    error_in(people.acme.load("a", "x"), 400)


def test_files_swapped_during_a_read_are_unloaded(people, root, monkeypatch):
    load = people.llm.adapters.load

    async def load_while_it_changes(request, **options):
        (root / "acme" / "x").rename(root / "acme" / "aside")
        (root / "acme" / "x").symlink_to(root / "globex" / "x")
        return await load(request, **options)

    monkeypatch.setattr(people.llm.adapters, "load", load_while_it_changes)
    assert error_in(people.acme.load("a"), 400)["param"] == "lora_path"
    assert people.llm.calls[-1] == {"unload": engine_name("acme", "a"), "mode": "abort"}


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_of_the_engine_have_plain_names(people):
    people.acme.load("own")
    name = engine_name("acme", "own")
    people.llm.error, people.llm.fail_after = AdapterError(f"the files of adapter '{name}' changed: {name!r}"), 0
    assert error_in(people.acme.use("own"), 400)["message"] == "the files of adapter 'own' changed: 'own'"
    response = people.acme.post("/v1/completions", {"model": "own", "prompt": "x", "stream": True})
    assert "x1f" not in response.text
    assert "adapter 'own'" in response.text


def test_an_adapter_that_the_engine_lost_can_be_unloaded(people):
    people.acme.load("own")
    del people.llm.in_engine[engine_name("acme", "own")]
    assert people.acme.unload("own").status_code == 200
    error_in(people.acme.unload("own"), 404)


def test_discovering_names_never_means_a_tenants_own(people, monkeypatch):
    """Adapters that a resolver finds by name are shared; one's own name is not asked for there."""
    people.acme.load("own")
    asked = []

    async def find(name):
        asked.append(name)
        return LoRARequest(name, path="/found") if name == "anything" else None

    monkeypatch.setattr(type(people.llm.sources), "finds_names", True)
    monkeypatch.setattr(people.llm.sources, "find", find)
    assert used(people, "globex", "anything")[0].path == "/found"
    used(people, "acme", "own")
    assert not any(MARK in name for name in asked)
    people.llm.in_engine["anything"] = AdapterInfo("anything", "/found", "", 0, 0, "disk")
    assert asyncio.run(people.http.app.state.serving.models.refresh()) is None
    error_in(people.picky.use("anything"), 404)
