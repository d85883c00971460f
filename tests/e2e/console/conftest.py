"""The console in Debian's Chromium, in front of a real server with tenants."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from outrider.models.demo import demo_adapters

CHROMIUM = "/usr/bin/chromium"
SECONDS = 30
"""Longest wait for an element to appear: the machine may be busy."""


class Console:
    """One tab. Everything it asked for and everything it complained about is kept."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(1000 * SECONDS)
        expect.set_options(timeout=1000 * SECONDS)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("console", lambda message: self._on_console(message.text))

    def _on_console(self, text: str) -> None:
        # The browser says by itself that a call was answered with 4xx, or not at all.
        if not text.startswith("Failed to load resource"):
            self.complaints.append(text)

    def open(self, key: str | None = None) -> "Console":
        """Go to the page, and sign in."""
        self.page.goto(f"{self.url}/console")
        if key is not None:
            self.page.get_by_label("Admin key").fill(key)
            self.page.get_by_role("button", name="Sign in").click()
            expect(self.page.get_by_role("heading", name="Overview")).to_be_visible()
        return self

    def ask(self, text: str, model: str | None = None) -> None:
        """Send a message in the playground."""
        if model is not None:
            self.page.get_by_label("Model or adapter").select_option(model)
        self.page.get_by_placeholder("Message").fill(text)
        self.page.get_by_role("button", name="Send").click()

    def answer(self, index: int = 0) -> Locator:
        """An answer that is complete."""
        turn = self.page.locator(".turn.answer").nth(index)
        expect(turn.locator(".turn-foot")).not_to_be_empty()
        return turn

    def tokens(self, turn: Locator) -> list[tuple[str, str]]:
        """(text, "drafted" or "sampled") of an answer's tokens."""
        spans = turn.locator(".token").evaluate_all("spans => spans.map(s => [s.textContent, s.className])")
        return [(text, names.split()[1]) for text, names in spans]

    def rejections(self, turn: Locator) -> list[int]:
        """Number of rejected drafts marked at each of an answer's tokens, and behind the last one."""
        places = turn.locator(".token, .rejections")
        return places.evaluate_all("spans => spans.map(s => Number(s.dataset.rejected ?? 0))")

    def adapter(self, name: str) -> Locator:
        """The row of an adapter."""
        return self.page.locator("#adapter-rows tr").filter(
            has=self.page.locator("th > span").get_by_text(re.compile(f"^{re.escape(name)}$"))
        )

    def figure(self, name: str) -> Locator:
        """One of the figures next to the conversation."""
        return self.page.locator(f'#answer-stats dt:text-is("{name}") + dd')


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser."""
    path = shutil.which("chromium") or CHROMIUM
    if not Path(path).exists():
        pytest.skip("there is no chromium on this machine")
    return path


@pytest.fixture(scope="module")
def browser(chromium) -> Iterator[Browser]:
    """Ends with the module: as long as it lives, an event loop runs in this thread, and tests can run no other."""
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=[*flags, "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_tab(browser) -> Iterator[Callable[..., Console]]:
    """Makes tabs, each with nothing stored; an error on their pages fails the test."""
    tabs: list[Console] = []

    def open_tab(url: str, **options) -> Console:
        defaults = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
        context = browser.new_context(**(defaults | options))
        tabs.append(Console(context.new_page(), url))
        return tabs[-1]

    yield open_tab
    for tab in tabs:
        tab.page.context.close()
    assert [complaint for tab in tabs for complaint in tab.complaints] == []


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Sources from which adapters may be loaded: one, "extra"."""
    folder = tmp_path_factory.mktemp("console")
    shutil.copytree(demo_adapters()["sql"], folder / "extra")
    return folder


@pytest.fixture(scope="session")
def admin_key() -> str:
    return "the-operators-key-of-the-test"


@pytest.fixture(scope="session")
def tenants(chromium, start_shared, fixed_drafts, folder, admin_key):
    """A server with a database; none without a browser, which all tests need."""
    options = ["--database", f"sqlite:///{folder}/outrider.db", "--admin-api-key", admin_key]
    return start_shared(*fixed_drafts, *options, "--lora-root", str(folder))


@pytest.fixture(scope="session")
def api(tenants, admin_key) -> Iterator[httpx.Client]:
    """An operator, without a browser."""
    with tenants.http(headers={"Authorization": f"Bearer {admin_key}"}) as http:
        yield http


@pytest.fixture(scope="session")
def user_key(api) -> str:
    """Key of the tenant acme, which may only generate."""
    limits = {"requests_per_minute": 600, "max_output_tokens": 500, "token_budget": 10_000, "budget_period": "day"}
    assert api.post("/admin/v1/tenants", json={"name": "acme", "weight": 2, "limits": limits}).status_code == 201
    made = api.post("/admin/v1/keys", json={"tenant": "acme"})
    assert made.status_code == 201, made.text
    return made.json()["key"]


@pytest.fixture
def tab(open_tab, tenants) -> Console:
    """Not signed in."""
    return open_tab(tenants.url)


@pytest.fixture
def signed_in(tab, admin_key) -> Console:
    return tab.open(admin_key)
