"""The site: it builds without a warning, needs no network to be read, and its search finds things. All slow."""

import functools
import html.parser
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest

import lossscale

pytestmark = [pytest.mark.slow, pytest.mark.processes]

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. Its tools have an environment of their own; without one, and without a network, skip."""
    venv = Path(os.environ.get("DOCS_VENV", ROOT / ".venv-docs"))
    if not (venv / "bin" / "mkdocs").exists():
        made = subprocess.run(["make", "docs-install"], cwd=ROOT, capture_output=True, text=True, timeout=600)
        if made.returncode:
            pytest.skip(f"the site's tools are not installed and could not be: {made.stderr[-300:]}")
    folder = tmp_path_factory.mktemp("site")
    command = [venv / "bin" / "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    return folder


class Fetched(html.parser.HTMLParser):
    """Collects what a browser fetches to show a page, and the ids in it."""

    def __init__(self, page):
        super().__init__()
        self.addresses, self.ids = [], set()
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids.add(attributes.get("id"))
        if tag in ("script", "img", "source", "iframe"):
            self.addresses += [attributes.get("src"), attributes.get("srcset")]
        if tag == "link" and attributes.get("rel") in ("stylesheet", "icon", "preload"):
            self.addresses.append(attributes["href"])


def test_nothing_is_fetched_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        foreign = [address for address in Fetched(page).addresses if address and "//" in address]
        assert not foreign, (page, foreign)
    styles = "".join(style.read_text("utf-8") for style in site.rglob("*.css"))
    assert not re.findall(r"@import|url\(['\"]?(?:https?:)?//", styles)


def test_every_public_name_has_an_anchor_with_its_signature(site):
    found = set().union(*(Fetched(page).ids for page in (site / "api").rglob("index.html")))
    assert {f"lossscale.{name}" for name in lossscale.__all__} <= found


def test_search_index_finds_overflow_and_every_public_name(site):
    entries = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    places = [entry["location"] for entry in entries if "overflow" in (entry["title"] + entry["text"]).lower()]
    assert len(places) > 20
    assert any(place.startswith("troubleshooting/") for place in places)
    titles = " ".join(entry["title"] for entry in entries)
    assert all(name in titles for name in lossscale.__all__)


# A page beside the site that opens it, types a word into its search, and tells the server which links came up.
SEARCHING = """<!DOCTYPE html><iframe id="site" src="/" width="1200" height="800"></iframe><script>
setInterval(() => {
  const page = document.getElementById("site").contentDocument
  const input = page.querySelector(".md-search__input")
  if (!input) return
  if (input.value != "overflow") { input.focus(); input.value = "overflow" }
  input.dispatchEvent(new Event("keyup"))
  const links = [...page.querySelectorAll(".md-search-result__link")].map((link) => link.pathname)
  if (links.length > 2) fetch("/found", {method: "POST", body: JSON.stringify(links)})
}, 300)
</script>"""


class Searched(http.server.SimpleHTTPRequestHandler):
    """Serves the site and the page above; keeps what the page found in the server."""

    def do_GET(self):
        if self.path != "/searching":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        return self.wfile.write(SEARCHING.encode())

    def do_POST(self):
        self.server.links = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.server.found.set()

    def log_message(self, *_):
        pass


def test_search_in_a_browser(site, tmp_path):
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("no Chromium on PATH")
    handler = functools.partial(Searched, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.found, server.links = threading.Event(), []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        command = [browser, *flags, "--remote-debugging-port=0", f"http://127.0.0.1:{server.server_port}/searching"]
        log = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, start_new_session=True, **log)
        try:
            assert server.found.wait(60), "the search in the browser found nothing"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            server.shutdown()
    assert any(link.startswith("/troubleshooting/") for link in server.links), server.links
