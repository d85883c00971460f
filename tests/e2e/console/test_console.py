"""The console, in a real browser in front of a real server with tenants."""

from playwright.sync_api import expect

XSS = "<img src=x onerror=alert(1)>"
"""The name of an adapter."""
QUESTION = "My order has not arrived yet. What can I do?"

# --- signing in ---


def test_signing_in_and_out(tab, user_key, admin_key):
    page = tab.open().page
    error = page.locator("#login-error")
    expect(page.get_by_label("Admin key")).to_be_focused()
    expect(page.get_by_role("heading", name="Overview")).to_be_hidden()
    for key, message in (("wrong", "does not know this key"), (user_key, "not an operator's")):
        page.get_by_label("Admin key").fill(key)
        page.keyboard.press("Enter")
        expect(error).to_contain_text(message)
    page.get_by_label("Admin key").fill(admin_key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.reload()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Admin key")).to_be_focused()
    assert page.get_by_label("Admin key").input_value() == ""
    assert page.evaluate("JSON.stringify([sessionStorage.length, Object.keys(localStorage)])") == "[0,[]]"
    page.reload()
    expect(page.get_by_label("Admin key")).to_be_visible()


def test_a_key_that_is_revoked_leads_back_to_the_form(open_tab, tenants, api, user_key, admin_key):
    made = api.post("/admin/v1/keys", json={"tenant": "acme", "scopes": ["admin"]}).json()
    tab = open_tab(tenants.url)
    tab.open(made["key"])
    api.delete(f"/admin/v1/keys/{made['id']}")
    expect(tab.page.locator("#login-error")).to_contain_text("does not know this key")
    expect(tab.page.get_by_role("heading", name="Overview")).to_be_hidden()


# --- what is shown ---


def test_live_numbers_follow_the_requests(signed_in, api):
    page = signed_in.page
    throughput = page.locator(".chart", has_text="Throughput").locator(".chart-value")
    expect(throughput).to_contain_text("tokens/s")
    for _ in range(3):
        body = {"model": "support", "prompt": QUESTION, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        assert api.post("/v1/completions", json=body).status_code == 200
    expect(throughput).not_to_have_text("0 tokens/s")
    first_token = page.locator(".chart", has_text="Time to first token")
    expect(first_token.locator(".chart-value")).to_contain_text("s p50")
    expect(first_token.locator(".chart-note")).to_contain_text("in 30 s")
    expect(page.locator(".chart", has_text="Speculation").locator(".chart-note")).to_contain_text("accepted")
    row = signed_in.adapter("support")
    expect(row).to_contain_text("a round")
    expect(row).to_contain_text("with:")
    assert page.locator(".plot canvas").count() == 6


def test_tenants_with_limits_and_usage(signed_in, tenants, user_key):
    page = signed_in.page
    row = page.locator("#tenant-rows tr", has_text="acme")
    expect(row).to_contain_text("600 requests/min · max tokens 500")
    expect(row).to_contain_text("of 10,000 tokens this day")
    requests, budget = row.locator("td").nth(3), row.locator("meter")
    before = int(requests.inner_text())
    with tenants.http(headers={"Authorization": f"Bearer {user_key}"}) as http:
        answer = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 8, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    page.get_by_label("Usage of").select_option("the last hour")
    expect(requests).to_have_text(str(before + 1))
    assert float(budget.get_attribute("value")) > 0
    expect(row).to_contain_text("active")


# --- adapters ---


def test_loading_pinning_and_unloading(signed_in, folder, api):
    page = signed_in.page

    def load(path: str) -> None:
        page.get_by_label("Name", exact=True).fill(XSS)
        page.get_by_label("Folder or source").fill(path)
        page.get_by_role("button", name="Load", exact=True).click()

    page.get_by_role("button", name="Load adapter").click()
    load(str(folder / "nothing"))
    expect(page.locator("#load-error")).to_contain_text("nothing")
    load(str(folder / "extra"))
    row = signed_in.adapter(XSS)
    expect(row).to_be_visible()
    expect(page.locator("#adapter-message")).to_have_text(f"{XSS} has been loaded.")
    expect(page.get_by_label("Model or adapter").locator("option", has_text=XSS)).to_have_count(1)
    assert page.locator("#console img").count() == 0, "a name is never HTML"

    row.get_by_role("button", name="Pin").click()
    expect(row).to_contain_text("pinned")
    assert api.get("/v1/models").json()["data"][-1]["pinned"] is True
    row.get_by_role("button", name="Unpin").click()
    expect(row).not_to_contain_text("pinned")

    row.get_by_role("button", name="Unload").click()
    expect(page.locator("#confirm-text")).to_contain_text(XSS)
    page.get_by_role("button", name="Cancel").click()
    expect(row).to_be_visible()
    row.get_by_role("button", name="Unload").click()
    page.locator("#confirm-yes").click()
    expect(row).to_have_count(0)
    assert XSS not in [card["id"] for card in api.get("/v1/models").json()["data"]]


def test_a_failed_action_shows_the_reason(signed_in, folder, api):
    page = signed_in.page
    body = {"lora_name": "brief", "lora_path": str(folder / "extra")}
    assert api.post("/v1/load_lora_adapter", json=body).status_code == 200
    page.reload()
    row = signed_in.adapter("brief")
    expect(row).to_be_visible()
    page.route("**/v1/models", lambda route: route.abort())  # the page does not hear that it is gone
    row.get_by_role("button", name="Unload").click()
    assert api.post("/v1/unload_lora_adapter", json={"lora_name": "brief"}).status_code == 200
    page.locator("#confirm-yes").click()
    expect(page.locator("#confirm-error")).to_contain_text("does not exist")
    page.keyboard.press("Escape")
    expect(page.locator("#confirm-dialog")).to_be_hidden()
    row.get_by_role("button", name="Pin").click()
    expect(page.locator("#adapter-message")).to_contain_text("does not exist")


def test_filter(signed_in):
    signed_in.page.get_by_label("Filter adapters by name").fill("SQ")
    expect(signed_in.adapter("json")).to_have_count(0)
    expect(signed_in.adapter("sql")).to_be_visible()
    signed_in.page.get_by_label("Filter adapters by name").fill("nothing like this")
    expect(signed_in.page.get_by_text("No adapter has this name.")).to_be_visible()


# --- for everybody ---


def test_all_of_it_by_keyboard(tab, admin_key):
    page = tab.open().page
    keyboard = page.keyboard
    expect(page.get_by_label("Admin key")).to_be_focused()
    assert page.get_by_label("Admin key").evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    keyboard.type(admin_key)
    keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.locator("main")).to_be_focused()
    page.reload()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()

    def tab_to(locator, most: int = 40) -> None:
        for _ in range(most):
            if locator.evaluate("e => e === document.activeElement"):
                return
            keyboard.press("Tab")
        raise AssertionError(f"{locator} cannot be reached with Tab")

    tab_to(page.get_by_role("button", name="Load adapter"))
    keyboard.press("Enter")
    expect(page.get_by_label("Name", exact=True)).to_be_focused()
    keyboard.press("Escape")
    expect(page.get_by_role("button", name="Load adapter")).to_be_focused()
    tab_to(pin := tab.adapter("sql").get_by_role("button", name="Pin"))
    keyboard.press("Space")
    expect(tab.adapter("sql")).to_contain_text("pinned")
    expect(pin).to_be_focused()
    keyboard.press("Space")
    expect(tab.adapter("sql")).not_to_contain_text("pinned")
    tab_to(page.get_by_placeholder("Message"))
    keyboard.type("Hello")
    keyboard.press("Control+Enter")
    tab.answer()
    expect(page.get_by_placeholder("Message")).to_be_focused()


def test_every_control_has_a_name(signed_in):
    page = signed_in.page
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button, meter, [role=img]")]
            .filter((e) => e.type !== "text" || e.name !== "username")
            .filter((e) => !e.labels?.length && !e.ariaLabel && !e.textContent.trim())
            .filter((e) => !e.closest("dialog:not([open])"))
            .map((e) => e.outerHTML)"""
    )
    assert unnamed == []
    assert page.locator("html").get_attribute("lang") == "en"
    expect(page.locator("#turns")).to_have_attribute("role", "log")


def test_colours_follow_the_system_and_the_switch(open_tab, tenants):
    tab = open_tab(tenants.url, color_scheme="dark")
    page = tab.open().page

    def expect_theme(name: str) -> None:
        expect(page.locator("html")).to_have_attribute("data-theme", name)
        red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        assert (int(red) < 60) == (name == "dark")

    expect_theme("dark")
    page.emulate_media(color_scheme="light")
    expect_theme("light")
    page.get_by_label("Colours").select_option("Dark")
    expect_theme("dark")
    page.reload()
    expect_theme("dark")
    page.get_by_label("Colours").select_option("Auto")
    expect_theme("light")


def test_a_phone_shows_everything_without_scrolling_sideways(open_tab, tenants, user_key, admin_key):
    tab = open_tab(tenants.url, viewport={"width": 360, "height": 740})
    page = tab.open(admin_key).page
    expect(page.locator("#tenant-rows tr")).not_to_have_count(0)
    expect(tab.adapter("sql").get_by_role("button", name="Unload")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    right = page.evaluate(
        "Math.max(...[...document.querySelectorAll('#console button, #console select')]"
        ".filter(e => e.checkVisibility()).map(e => e.getBoundingClientRect().right))"
    )
    assert right <= 360
    tab.ask(QUESTION, "support")
    expect(tab.answer().locator(".turn-foot")).to_be_in_viewport()  # the page follows to the last line


def test_nothing_is_asked_from_elsewhere_and_nothing_foreign_runs(signed_in, admin_key):
    page = signed_in.page
    signed_in.ask("Hello")
    signed_in.answer()
    assert {url[: len(signed_in.url)] for url in signed_in.requests} == {signed_in.url}
    assert not any(admin_key in url for url in signed_in.requests)
    refused = page.evaluate(
        """async () => {
            const found = [];
            try { document.body.innerHTML = "<p>x"; } catch (error) { found.push(error.name); }
            const script = document.createElement("script");
            try {
                script.text = "window.ran = true";
                document.body.append(script);
            } catch (error) { found.push(error.name); }
            const [blocked] = await Promise.all([
                new Promise((resolve) => document.addEventListener("securitypolicyviolation", (event) => {
                    if (event.blockedURI.includes("example")) resolve(event.effectiveDirective);
                })),
                fetch("https://example.com/").catch(() => {}),
            ]);
            return [...found, blocked, window.ran];
        }"""
    )
    assert refused[0] == refused[1] == "TypeError"
    assert refused[2:] == ["connect-src", None]
    assert any("Trusted" in text or "Content Security Policy" in text for text in signed_in.complaints)
    signed_in.complaints.clear()


def test_a_busy_tab_asks_once_a_second(signed_in):
    page = signed_in.page
    page.wait_for_timeout(3000)
    asked = [url for url in signed_in.requests if "/admin/v1/stats" in url]
    assert 2 <= len(asked) <= 6
    assert sum("history" in url for url in asked) == 2, "what is past: once without a key, and once with it"


# --- when something is away ---


def test_a_server_that_is_away_is_shown_until_it_is_back(signed_in):
    page = signed_in.page
    page.context.set_offline(True)
    expect(page.locator("#state")).to_have_text("unreachable")
    expect(page.get_by_role("alert").filter(has_text="cannot be reached")).to_be_visible()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.context.set_offline(False)
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#banner")).to_be_hidden()


def test_an_engine_that_starts_again_is_shown(signed_in, tenants):
    page = signed_in.page
    expect(page.locator("#state")).to_have_text("ready")
    tenants.engine().kill()
    expect(page.locator("#state")).to_have_text("restarting")
    expect(page.locator("#banner")).to_contain_text("started again")
    expect(page.locator("#state")).to_have_text("ready", timeout=120_000)
    expect(page.locator("#facts")).to_contain_text("1 engine restart")
    assert tenants.http().get("/health").status_code == 200
