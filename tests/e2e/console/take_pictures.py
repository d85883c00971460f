"""Takes docs/console-light.png and docs/console-dark.png: the console in front of the demo model, with tenants at work.

    python tests/e2e/console/take_pictures.py [FOLDER]

It needs Chromium, and takes two minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import Page, Route, expect, sync_playwright

from outrider.models.demo import demo_adapters, demo_eagle3_path

DOCS = Path(__file__).resolve().parents[3] / "docs"
KEY = "the-operators-key-of-the-picture"
LOAD_SECONDS = 75
TENANTS = {
    "acme": {
        "weight": 2, "max_adapters": 3,
        "limits": {
            "requests_per_minute": 6000, "max_concurrent_requests": 8,
            "token_budget": 400_000, "budget_period": "month",
        },
    },
    "globex": {"limits": {"tokens_per_minute": 2_000_000, "allowed_adapters": ["sql", "json"]}},
    "initech": {
        "limits": {
            "max_context_tokens": 1024, "max_output_tokens": 256, "token_budget": 20_000, "budget_period": "day",
        },
    },
    "umbrella": {"weight": 0.5},
}  # fmt: skip
WORK = {
    "acme": [("support", "Where is my order?"), ("outrider-demo", "Tell me about the weather in Rome.")],
    "globex": [("sql", "List all customers from Paris."), ("json", "Anna is 34 years old and lives in Berlin.")],
    "initech": [("outrider-demo", "Tell me about trains.")],
}
CONVERSATION = [("support", "My order has not arrived yet. What can I do?"), ("sql", "List all customers from Berlin.")]


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """A server of the demo model with its adapters; the address."""
    adapters = folder / "adapters"
    for name, path in demo_adapters().items():
        shutil.copytree(path, adapters / name)
    command = [sys.executable, "-m", "outrider.platform.cli.main", "serve", "--port", "0", "--admin-api-key", KEY]
    command += ["--database", f"sqlite:///{folder}/outrider.db", "--lora-root", str(adapters)]
    command += ["--lora-modules", *(f"{name}={adapters / name}" for name in demo_adapters())]
    command += ["--scheduling-policy", "fair", "--speculative-config"]
    command += [f'{{"method": "eagle3", "model": "{demo_eagle3_path()}", "num_speculative_tokens": 4}}']
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="")
            if ready := re.search(r"Outrider is ready on (http://\S+)", line):
                break
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=lambda: list(process.stdout or ()), daemon=True).start()  # its pipe must not fill
        yield ready[1]
    finally:
        process.terminate()
        process.wait()


def make_tenants(url: str) -> dict[str, str]:
    """The tenants' keys."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, headers=headers, timeout=30) as http:
        http.post("/v1/pin_lora_adapter", json={"lora_name": "support"}).raise_for_status()
        for name, fields in TENANTS.items():
            http.post("/admin/v1/tenants", json={"name": name, **fields}).raise_for_status()
        keys = {name: http.post("/admin/v1/keys", json={"tenant": name}).json()["key"] for name in WORK}
        http.patch("/admin/v1/tenants/umbrella", json={"disabled": True}).raise_for_status()
    return keys


def work(url: str, key: str, requests: list[tuple[str, str]], end: threading.Event) -> None:
    """A tenant's client: one request after the other."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as http:
        for turn in range(1_000_000):
            model, text = requests[turn % len(requests)]
            body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 60}
            http.post("/v1/chat/completions", json=body | {"temperature": 0.2, "stream": False})
            if end.wait(0.15):
                return


def converse(page: Page) -> None:
    """Fill the playground."""
    for index, (model, text) in enumerate(CONVERSATION):
        page.get_by_label("Model or adapter").select_option(model)
        page.get_by_placeholder("Message").fill(text)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn.answer").nth(index).locator(".turn-foot")).to_contain_text(
            "acceptance", timeout=60_000
        )


def show_as_installed(route: Route, folder: str) -> None:
    """Answer with the path of an installation in place of the temporary folder."""
    answer = route.fetch()
    route.fulfill(response=answer, body=answer.text().replace(folder, "/srv"))


def main(target: Path) -> None:
    """Take both pictures into `target`."""
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as url, sync_playwright() as playwright:
        end = threading.Event()
        for name, key in make_tenants(url).items():
            threading.Thread(target=work, args=(url, key, WORK[name], end), daemon=True).start()
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=[*flags, "--disable-dev-shm-usage", "--disable-gpu"]
        )
        page = browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce").new_page()
        for pattern in ("**/v1/models", "**/admin/v1/stats*"):
            page.route(pattern, lambda route: show_as_installed(route, folder))
        page.goto(f"{url}/console")
        page.get_by_label("Admin key").fill(KEY)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_timeout(1000 * LOAD_SECONDS)
        converse(page)
        for theme in ("light", "dark"):
            page.get_by_label("Colours").select_option(theme)
            page.evaluate("window.scrollTo(0, 0); document.activeElement.blur()")
            page.wait_for_timeout(2000)
            page.screenshot(path=target / f"console-{theme}.png", full_page=True)
        end.set()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
