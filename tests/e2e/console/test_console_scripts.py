"""The console's scripts that need no server: its files are given to the browser directly."""

import random

import pytest
from playwright.sync_api import expect

from outrider.platform.http.admin.admin_schema import LimitFields
from outrider.platform.http.console.assets import Assets
from outrider.platform.http.console.stats_schema import Point, Stats

ADDRESS = "http://console.test"
XSS = "<img src=x onerror=alert(1)>"


@pytest.fixture
def page(open_tab):
    """The console's page; of the server, there is what a test adds to `page.answers`: path -> JSON."""
    assets = Assets()
    page = open_tab(ADDRESS).page
    page.answers = {}
    prefix = f"/console/assets/{assets.version}/"

    def answer(route) -> None:
        path = route.request.url.removeprefix(ADDRESS).partition("?")[0]
        asset = assets.page if path == "/console" else assets.find(assets.version, path.removeprefix(prefix))
        if asset is not None:
            route.fulfill(body=asset.content, content_type=asset.media_type)
        elif path in page.answers:
            route.fulfill(json=page.answers[path])
        else:
            route.fulfill(status=401, json={"error": {"message": "no", "type": "AuthenticationError"}})

    page.route("**/*", answer)
    return page


@pytest.fixture
def run(page):
    """Runs the body of a function of (module, argument) in the page; the module is one of its scripts."""
    page.goto(f"{ADDRESS}/console")
    page.locator("#login").wait_for()

    def run(module: str, code: str, argument):
        load = f"await import(new URL({module!r}, document.querySelector('script[type=module]').src))"
        return page.evaluate(f"async (argument) => {{ const module = {load}; {code} }}", argument)

    return run


POINT = dict.fromkeys(Point.model_fields) | {"time": 1000, "ttft_count": 0, "itl_count": 0}
POINT |= {"output_tokens_per_second": 0, "prompt_tokens_per_second": 0, "requests_per_second": 0}
STATS = {
    "time": 1000, "live": POINT, "speculation": None, "tokens_by_drafter": {}, "adapters": [], "adapters_left_out": 0,
    "tenants": [], "history": [POINT], "kv_cache": {"usage": 0, "prefix_queries": 0, "prefix_hits": 0},
    "server": {
        "state": "ready", "version": "1", "uptime": 5, "engine_restarts": 0, "snapshot_age": 0.1, "model": XSS,
        "architecture": "A", "dtype": "float32", "device": "cpu", "num_parameters": 5, "max_model_len": 64,
        "speculation": "off", "num_kv_blocks": 10, "block_size": 16, "has_tenants": False,
    },
    "queue": {"running": 0, "waiting": 3, "waiting_by_reason": {"max_loras": 2, XSS: 1}, "preemptions": 0},
    "lora": {
        "rows": 0, "rows_used": 0, "host_bytes": 0, "registered": 0, "on_device": 0, "in_host_memory": 0,
        "load_failures": 0,
    },
}  # fmt: skip


def test_an_open_server_asks_for_no_key(page):
    """And one without adapters, tenants, speculation or any request yet is shown as it is."""
    Stats.model_validate(STATS)
    card = {"id": XSS, "parent": None, "root": "/model"}
    page.answers |= {"/admin/v1/stats": STATS, "/v1/models": {"object": "list", "data": [card]}}
    page.goto(f"{ADDRESS}/console")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.get_by_label("Admin key")).to_be_hidden()
    expect(page.get_by_role("button", name="Sign out")).to_be_hidden()
    expect(page.get_by_role("heading", name="Tenants")).to_be_hidden()
    expect(page.get_by_role("button", name="Load adapter")).to_be_disabled()
    expect(page.get_by_text(f"2 for one of the adapter places · 1 {XSS}")).to_be_visible()
    expect(page.locator("#facts")).to_contain_text(XSS)
    expect(page.get_by_label("Model or adapter")).to_have_value(XSS)
    assert page.locator("img[src=x]").count() == 0


ENDLESS_ANSWERS = """() => {
    const real = window.fetch;
    window.bodies = [];
    window.fetch = async (url, options) => {
        if (!String(url).includes("chat")) return real(url, options);
        window.bodies.push(JSON.parse(options.body));
        const first = `data: ${JSON.stringify({ choices: [{ delta: { content: "so" } }] })}\\n\\n`;
        return new Response(new ReadableStream({ start(c) { c.enqueue(new TextEncoder().encode(first));
            options.signal.addEventListener("abort", () => c.error(options.signal.reason)); } }));
    };
}"""


def test_state_of_a_conversation_does_not_leak_into_the_next(page):
    """An answer that is in flight when a new one is begun, or its reader signs out."""
    card = {"id": "m", "parent": None, "root": "/model"}
    page.answers |= {"/admin/v1/stats": STATS, "/v1/models": {"object": "list", "data": [card]}}
    page.goto(f"{ADDRESS}/console")
    page.evaluate(ENDLESS_ANSWERS)
    for text in ("One", "Two"):
        page.get_by_placeholder("Message").fill(text)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn-text")).to_have_text("so")
        page.get_by_role("button", name="New conversation").click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
    messages = page.evaluate("window.bodies.map((body) => body.messages.map((message) => message.content))")
    assert messages == [["One"], ["Two"]]


def test_the_requests_settings_are_sent(page):
    card = {"id": "m", "parent": None, "root": "/model"}
    page.answers |= {"/admin/v1/stats": STATS, "/v1/models": {"object": "list", "data": [card]}}
    page.goto(f"{ADDRESS}/console")
    page.evaluate(ENDLESS_ANSWERS)
    for system, top_p, seed in (("", "1", ""), ("Be brief.", "0.5", "7")):
        page.get_by_label("System prompt").fill(system)
        page.get_by_label("Top-p").fill(top_p)
        page.get_by_label("Seed").fill(seed)
        page.get_by_placeholder("Message").fill("Hello")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn-text")).to_have_text("so")
        page.get_by_role("button", name="New conversation").click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
    plain, chosen = page.evaluate("window.bodies")
    assert (plain["top_p"], "seed" in plain, [m["role"] for m in plain["messages"]]) == (1, False, ["user"])
    assert (chosen["top_p"], chosen["seed"]) == (0.5, 7)
    assert chosen["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"},
    ]  # fmt: skip


def test_every_state_of_the_server_is_explained(page):
    page.answers |= {"/v1/models": {"object": "list", "data": []}}
    for state in ("starting", "restarting", "draining", "stopped"):
        page.answers["/admin/v1/stats"] = STATS | {"server": STATS["server"] | {"state": state}}
        page.goto(f"{ADDRESS}/console")
        expect(page.locator("#state")).to_have_text(state)
        expect(page.locator("#banner")).not_to_be_empty()


def test_tenants_as_they_may_be(page):
    tenant = {"name": XSS, "weight": 0.5, "limits": dict.fromkeys(LimitFields.model_fields), "max_adapters": 3}
    limits = {"token_budget": 100, "budget_period": "week", "allowed_adapters": [XSS], "max_queued_requests": 0}
    usage = {"tenant": XSS, "requests": 5, "prompt_tokens": 70, "output_tokens": 25}
    page.answers |= {
        "/admin/v1/stats": STATS | {"server": STATS["server"] | {"has_tenants": True}},
        "/admin/v1/tenants": {
            "data": [
                tenant | {"disabled": True, "limits": tenant["limits"] | limits},
                tenant | {"name": "free", "disabled": False},
            ]
        },
        "/admin/v1/usage": {"data": [usage]},
        "/v1/models": {"object": "list", "data": []},
    }
    page.goto(f"{ADDRESS}/console")
    rows = page.locator("#tenant-rows tr")
    first, second = rows.nth(0), rows.nth(1)
    expect(first).to_contain_text(XSS)
    expect(first).to_contain_text("disabled")
    expect(first).to_contain_text("95 of 100 tokens this week")
    expect(first).to_contain_text(f"0 queued · adapters: {XSS}")
    expect(first).to_contain_text("may load 3 adapters of its own")
    expect(second).to_contain_text("active")
    assert second.locator("td").last.inner_text() == ""
    assert page.locator("img[src=x]").count() == 0


SPLITS = [
    ([["He", "llo", " you"], ["!"]], ["Hello you", "!"], [["He", "llo", " you"], ["!"]]),
    ([["é"], ["\ufffd", "\ufffd", " x"]], ["é", "ü x"], [["é"], ["ü", " x"]]),  # pieces of a character
    ([["\ufffd"], ["\ufffd", "b"]], ["", "äb"], [[], ["ä", "b"]]),  # in two chunks
    ([["Hello", "<end>"]], ["Hello"], [["Hello"]]),  # a special token
    ([["<think>", "Yes", "."]], ["Yes."], [["Yes", "."]]),
    ([["Hello", "you"]], ["Hello you"], [["Hello", " you"]]),  # a tokenizer that drops spaces
    ([["Hello", " wor"], []], ["Hello w", ""], [["Hello", " w"], []]),  # a stop string cut it
    ([["a", "b"]], ["something else"], [["something else"]]),
    ([[], ["x"]], ["early", "x"], [["early"], ["x"]]),
]


def test_a_text_is_split_among_its_tokens(run):
    code = """return argument.map(([tokens, contents]) => {
        const splitter = new module.TokenSplitter();
        return contents.map((content, i) => {
            const pieces = splitter.push(tokens[i].map((text) => ({ text })), content);
            return pieces.map((piece) => piece.text);
        });
    })"""
    found = run("tokens.js", code, [[tokens, contents] for tokens, contents, _ in SPLITS])
    assert found == [expected for _, _, expected in SPLITS]


def test_pieces_are_always_the_whole_text(run):
    """Whatever the tokens say of themselves."""
    random.seed(5)
    texts = ["a", "b", "ab", " ", "", "\ufffd", "<end>", "a b"]
    cases = []
    for _ in range(300):
        tokens = [[random.choice(texts) for _ in range(random.randrange(4))] for _ in range(5)]
        cases.append([tokens, ["".join(random.choices("ab <", k=random.randrange(6))) for _ in range(5)]])
    code = """return argument.map(([tokens, contents]) => {
        const splitter = new module.TokenSplitter();
        return contents.map((content, i) => splitter.push(tokens[i].map((text) => ({ text })), content)
            .map((piece) => piece.text).join(""));
    })"""
    assert run("tokens.js", code, cases) == [contents for _, contents in cases]


def test_verification_steps_and_rejected_drafts_are_shown(run):
    """Also if the last token of a step has no text: a piece of a character, or a special token at the end."""
    chunks = [
        [["Hi", True, 0], [" all", False, 1]],
        [["\ufffd", False, 3], ["\ufffd", False, 0], ["!", True, 0], ["<end>", False, 2]],
    ]
    code = """const turn = new module.Turn("m");
    for (const [tokens, content] of argument) turn.add({
        delta: { content },
        logprobs: { content: tokens.map(([token]) => ({ token, logprob: 0 })) },
        draft_status: tokens.map(([, drafted]) => drafted ? "drafted" : "sampled"),
        rejected_drafts: tokens.map(([, , rejected]) => rejected),
    });
    turn.end([]);
    const { children } = turn.root.querySelector(".turn-text");
    return [...children].map((e) => [e.textContent, e.className, e.dataset.rejected])"""
    found = run("turn.js", code, list(zip(chunks, ["Hi all", "ü!"], strict=True)))
    assert found == [
        ["Hi", "token drafted", None],
        [" all", "token sampled", "1"],
        ["ü", "token sampled round", "3"],
        ["!", "token drafted round", None],
        ["", "rejections", "2"],
    ]


NUMBERS = [
    ("count", [None, 0, 999, 99_999, 1_234_567], ["–", "0", "999", "99,999", "1.2M"]),
    ("rate", [0, 0.4, 9.96, 123.4], ["0", "0.4", "10.0", "123"]),
    ("percent", [None, 0, 0.00001, 0.034, 0.5, 1], ["–", "0 %", "< 0.1 %", "3.4 %", "50 %", "100 %"]),
    ("seconds", [None, 0, 0.0004, 0.012, 0.9, 2.345, 250], ["–", "0", "0.4 ms", "12 ms", "900 ms", "2.3 s", "250 s"]),
    ("bytes", [0, 999, 1500, 25_000_000, 3e9], ["0 B", "999 B", "1.5 kB", "25 MB", "3.0 GB"]),
    ("duration", [5, 130, 7300, 400_000], ["5 s", "2 min", "2 h", "4 days"]),
]


def test_numbers_for_people(run):
    code = "return argument.map(([name, values]) => values.map((value) => module[name](value)))"
    found = run("format.js", code, [[name, values] for name, values, _ in NUMBERS])
    assert found == [expected for _, _, expected in NUMBERS]


def test_events_come_whole_however_the_stream_is_cut(run):
    stream = 'data: {"a": "é\\n"}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'
    code = """const bytes = new TextEncoder().encode(argument);
    const results = [];
    for (let size = 1; size <= bytes.length; size++) {
        const body = new ReadableStream({ start(controller) {
            for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
            controller.close();
        } });
        const found = [];
        for await (const event of module.events(new Response(body))) found.push(event);
        results.push(JSON.stringify(found));
    }
    return [...new Set(results)]"""
    assert run("api.js", code, stream) == ['[{"a":"é\\n"},{"b":2}]']


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ('data: {"a": 1}\n\n', "The connection broke before the answer was complete"),
        ('data: {"error": {"message": "The engine died"}}\n\ndata: [DONE]\n\n', "The engine died"),
    ],
)
def test_streams_that_end_badly(run, stream, message):
    code = """const response = new Response(argument);
    try { for await (const event of module.events(response)); } catch (error) { return [error.name, error.message]; }
    return null"""
    assert run("api.js", code, stream) == ["Error", message]
