"""The console's playground: an answer's tokens, and conversations."""

import json
import re

from playwright.sync_api import expect

QUESTION = "My order has not arrived yet. What can I do?"


def test_tokens_are_coloured_as_the_api_says(signed_in, api):
    body = {
        "model": "support",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 200,
        "temperature": 0,
    }
    body |= {"return_draft_status": True, "return_metrics": True}
    said = api.post("/v1/chat/completions", json=body).json()
    choice, speculation = said["choices"][0], said["metrics"]["speculative_decoding"]
    signed_in.ask(QUESTION, "support")
    turn = signed_in.answer()
    tokens = signed_in.tokens(turn)
    assert "".join(text for text, _ in tokens) == choice["message"]["content"]
    assert turn.locator(".turn-text").text_content() == choice["message"]["content"]
    shown = [status for _, status in tokens]
    assert shown == choice["draft_status"][: len(shown)]
    assert len(choice["draft_status"]) - len(shown) <= 1, "only the end of the text has no text"
    assert {"drafted", "sampled"} == set(shown)
    begins = turn.locator(".token").evaluate_all("s => s.map(e => getComputedStyle(e).borderLeftWidth === '1px')")
    assert begins == [False, *(status == "sampled" for status in shown[:-1])], "a line before every round"
    rejected = speculation["num_draft_tokens"] - speculation["num_accepted_tokens"]
    marks = signed_in.rejections(turn)
    assert marks[: len(shown)] == choice["rejected_drafts"][: len(shown)], "rejected drafts stand at their place"
    assert sum(marks) == sum(choice["rejected_drafts"]) == rejected > 0
    mark = turn.locator(".token[data-rejected]").first
    assert mark.evaluate("e => getComputedStyle(e, '::before').content") == f'"×{next(filter(None, marks))}"'
    expect(mark).to_have_attribute("title", re.compile(r"^sampled · .+ likely · [0-9]+ drafts? rejected here$"))
    expect(signed_in.figure("Drafts rejected")).to_have_text(str(rejected))
    expect(signed_in.figure("Acceptance length")).to_have_text(f"{speculation['acceptance_length']:.2f}")
    expect(signed_in.figure("Acceptance rate")).to_have_text(f"{100 * speculation['acceptance_rate']:.0f} %")
    expect(turn.locator(".turn-foot")).to_contain_text("complete")


def test_the_colours_are_not_all_there_is(signed_in):
    """For those who do not see them apart."""
    page = signed_in.page
    styles = {
        name: page.locator(f"#token-legend .{name}").evaluate("e => getComputedStyle(e).borderBottomStyle")
        for name in ("drafted", "sampled")
    }
    assert styles == {"drafted": "solid", "sampled": "dotted"}


def test_without_speculation_every_token_is_sampled(signed_in):
    signed_in.page.get_by_label("Speculative decoding").uncheck()
    signed_in.page.get_by_label("Max tokens").fill("12")
    signed_in.ask("Tell me about Paris.", "outrider-demo")
    assert {status for _, status in signed_in.tokens(signed_in.answer())} == {"sampled"}
    expect(signed_in.figure("Acceptance length")).to_have_text("–")
    lines = signed_in.page.locator("#turns .round").evaluate_all("s => s.map(e => getComputedStyle(e).borderLeftWidth)")
    assert set(lines) == {"0px"}, "without drafts there are no rounds"


ORDER = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "price": {"type": "integer", "maximum": 999}},
    "required": ["name", "price"],
    "additionalProperties": False,
}
ARGUMENTS = {"name": "Bob", "city": "Paris", "quantity": 3, "color": "red", "item": "lamp", "price": 30}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {key: {} for key in fields}}}}
    for name, fields in (("new_order", ARGUMENTS), ("new_meeting", ["person", "topic", "day", "time", "place"]))
]


def test_a_schema_and_tools(signed_in):
    bodies, form = [], signed_in.page.get_by_label("JSON schema of the answer, or list of tools")
    signed_in.page.on("request", lambda r: bodies.append(r.post_data_json) if "chat" in r.url else None)
    form.fill("{")
    signed_in.ask("Anna paid 42 euros.", "json")
    expect(signed_in.page.locator("#playground-error")).to_contain_text("not JSON")
    assert not bodies
    form.fill(json.dumps(ORDER))
    signed_in.page.get_by_role("button", name="Send").click()
    assert set(json.loads(signed_in.answer(0).locator(".turn-text").text_content())) == {"name", "price"}
    form.fill(json.dumps(TOOLS))
    signed_in.page.get_by_role("button", name="New conversation").click()
    signed_in.ask("Bob from Paris bought 3 red lamps for 30 euros.", "tools")
    turn = signed_in.answer(0)
    expect(turn.locator(".turn-foot")).to_contain_text("calls a tool")
    name, arguments = turn.locator(".turn-call").text_content().split(" ", 1)
    assert (name, json.loads(arguments)) == ("new_order", ARGUMENTS)
    signed_in.ask("What is the capital of Portugal?", "tools")
    signed_in.answer(1)
    [call] = bodies[-1]["messages"][1]["tool_calls"]
    assert call["function"] == {"name": name, "arguments": arguments}


def test_a_conversation_goes_on_until_it_is_new(signed_in):
    bodies = []
    signed_in.page.on("request", lambda r: bodies.append(r.post_data_json) if "chat" in r.url else None)
    signed_in.page.get_by_label("Max tokens").fill("8")
    for index, text in enumerate(("One", "Two")):
        signed_in.ask(text)
        signed_in.answer(index)
    signed_in.page.get_by_role("button", name="New conversation").click()
    assert signed_in.page.locator(".turn").count() == 0
    signed_in.ask("Three")
    signed_in.answer()
    assert [[m["role"] for m in body["messages"]] for body in bodies] == [
        ["user"], ["user", "assistant", "user"], ["user"],
    ]  # fmt: skip


def test_stop(signed_in, tenants):
    page = signed_in.page
    # An answer of this model is short: the page gets only its first event.
    page.evaluate(
        """() => {
            const real = window.fetch;
            window.fetch = async (url, options) => {
                const response = await real(url, options);
                if (!String(url).includes("chat")) return response;
                const reader = response.body.getReader();
                const { value } = await reader.read();
                const first = new TextDecoder().decode(value).split("\\n\\n")[0] + "\\n\\n";
                const body = new ReadableStream({ start(c) { c.enqueue(new TextEncoder().encode(first));
                    options.signal.addEventListener("abort", () => c.error(options.signal.reason)); } });
                return new Response(body, response);
            };
        }"""
    )
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    signed_in.ask(QUESTION, "support")
    expect(page.locator("#turns")).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    expect(signed_in.answer().locator(".turn-foot")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(page.locator("#turns")).to_have_attribute("aria-busy", "false")


def test_errors_of_a_request_are_shown_and_nothing_is_lost(signed_in):
    page = signed_in.page
    page.get_by_label("Max tokens").fill("100000")
    signed_in.ask("Hello")
    expect(page.locator("#playground-error")).to_contain_text("max_tokens")
    assert page.get_by_placeholder("Message").input_value() == "Hello"
    assert page.locator(".turn").count() == 0


def test_nothing_is_sent_before_the_models_are_known(tab, admin_key):
    tab.page.clock.install()
    tab.page.route("**/v1/models", lambda route: route.abort())
    page = tab.open(admin_key).page
    page.get_by_placeholder("Message").fill("Hello")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    page.get_by_placeholder("Message").press("Control+Enter")
    expect(page.locator(".turn")).to_have_count(0)
    page.unroute("**/v1/models")
    page.clock.fast_forward(10_000)  # then it asks again
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
