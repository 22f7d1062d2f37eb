"""`make site`: a page for every document, links that lead somewhere, and nothing that is loaded from elsewhere."""

import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
SITE = REPOSITORY / "build/site"


class Page(HTMLParser):
    """The addresses of a page: where its links lead, what it loads, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loaded, self.anchors = set(), set(), {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors.add(given.get("id"))
        if tag == "a" and given.get("href"):
            self.links.add(given["href"])
        if tag in {"script", "img", "link"} and given.get("rel") not in {"canonical", "next", "prev"}:
            self.loaded.add(given.get("src") or given.get("href"))


@pytest.fixture(scope="module")
def pages():
    subprocess.run(["make", "site"], cwd=REPOSITORY, check=True, capture_output=True)
    return {path.name: Page(path) for path in SITE.glob("*.html") if path.name != "404.html"}


def test_every_document_is_a_page_that_can_be_searched(pages):
    names = {path.with_suffix(".html").name for path in (REPOSITORY / "docs").glob("*.md")}
    assert pages.keys() == names | {
        f"{name}.html" for name in ("index", "contributing", "changelog", "guarantees-tests", "results")
    }
    searched = (SITE / "search.json").read_text()
    assert all(f'"{name}' in searched for name in names)


def test_links_lead_to_pages_files_and_anchors_of_the_site(pages):
    broken = []
    for name, page in pages.items():
        for link in page.links:
            target = urlsplit(link)
            if target.scheme:
                continue
            path, anchor = unquote(target.path) or name, unquote(target.fragment)
            known = path not in pages or anchor in pages[path].anchors
            if not (SITE / path).exists() or not known:
                broken.append(f"{name}: {link}")
    assert broken == []


def test_pages_load_nothing_from_elsewhere(pages):
    loaded = {address for page in pages.values() for address in page.loaded if address}
    assert {address for address in loaded if urlsplit(address).scheme not in {"", "data"}} == set()
