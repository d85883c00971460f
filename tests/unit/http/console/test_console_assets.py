"""The console's page and files: caching and content security."""

import re

import pytest

from outrider.platform.http.console.assets import FOLDER, Assets


@pytest.fixture
def page(http) -> str:
    return http.get("/console").text


def links(page: str) -> list[str]:
    return re.findall(r'(?:src|href)="(console/[^"]+)"', page)


def test_the_page_is_open_and_reveals_nothing_of_the_server(make_http):
    page = make_http(api_keys=("secret",)).get("/console")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "secret" not in page.text
    assert "base" not in re.findall(r'value="([^"]*)"', page.text)


def test_every_file_of_the_page_is_there(http, page):
    assert len(links(page)) >= 8
    for link in links(page):
        response = http.get(f"/{link}")
        assert response.status_code == 200, link
        assert response.headers["cache-control"] == "public, max-age=31536000, immutable"


def test_every_module_that_is_imported_is_there(http, page):
    folder = next(link for link in links(page) if link.endswith("/js/main.js")).rpartition("/")[0]
    seen, to_see = set(), ["main.js"]
    while to_see:
        name = to_see.pop()
        seen.add(name)
        response = http.get(f"/{folder}/{name}")
        assert (response.status_code, response.headers["content-type"]) == (200, "text/javascript; charset=utf-8"), name
        to_see += [n for n in re.findall(r'from "\./([^"]+)"', response.text) if n not in seen]
    shipped = {path.name for path in (FOLDER / "js").iterdir()}
    assert shipped - seen == {"early-theme.js"}, "what nothing imports"


def test_a_browser_that_has_the_page_gets_no_body(http):
    first = http.get("/console")
    assert first.headers["cache-control"] == "no-cache"
    for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}'):
        again = http.get("/console", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
    assert http.get("/console", headers={"If-None-Match": '"other"'}).status_code == 200


def test_compressed_only_if_accepted(http):
    plain = http.get("/console", headers={"Accept-Encoding": "identity"})
    packed = http.get("/console", headers={"Accept-Encoding": "gzip, br"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.text == plain.text
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"])
    assert packed.headers["vary"] == plain.headers["vary"] == "Accept-Encoding"


def test_files_of_another_version_are_not_sent(http, page):
    link = links(page)[0]
    version = link.split("/")[2]
    assert http.get(f"/{link.replace(version, '0' * 16)}").status_code == 404


@pytest.mark.parametrize(
    "name", ["../routes.py", "..%2froutes.py", "index.html", "js/", "vendor/uplot/LICENSE", "nothing.js"]
)
def test_nothing_else_is_sent(http, page, name):
    version = links(page)[0].split("/")[2]
    response = http.get(f"/console/assets/{version}/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "NotFoundError"


def test_the_slash_leads_to_the_page(http):
    response = http.get("/console/")
    assert (response.status_code, response.headers["location"]) == (308, "../console")


def test_content_security_policy(http, page):
    for path in ("/console", f"/{links(page)[0]}"):
        headers = http.get(path).headers
        policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
        assert policy["require-trusted-types-for"] == "'script'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_nothing_in_our_files_needs_more_than_the_policy_allows():
    ours = [
        path for path in FOLDER.rglob("*") if path.suffix in (".html", ".css", ".js") and "vendor" not in path.parts
    ]
    assert len(ours) > 15
    for path in ours:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        assert not re.search(r"https?://", text), f"{path}: another host"
        assert not re.search(r"<script>|<style>|\sstyle=|\son[a-z]+=", text) or path.suffix != ".html", path


def test_the_version_follows_the_content(tmp_path):
    for name in ("index.html", "a.js"):
        (tmp_path / name).write_text(f"{name} {{{{assets}}}}")
    first = Assets(tmp_path)
    assert Assets(tmp_path).version == first.version
    (tmp_path / "a.js").write_text("changed")
    second = Assets(tmp_path)
    assert second.version != first.version
    assert second.page.etag != first.page.etag, "the page names the files of this version"


def test_the_chart_library_is_recorded():
    vendor = FOLDER / "vendor" / "uplot"
    version = re.search(r"uPlot ([\d.]+), MIT", (vendor / "README.md").read_text())[1]
    assert f"(v{version})" in (vendor / "uPlot.iife.min.js").read_text(encoding="utf-8")[:100]
    assert "Permission is hereby granted" in (vendor / "LICENSE").read_text()
