"""The page at ``/`` shows models, and its links and its text are of the server that shows it."""

from __future__ import annotations

import urllib.request
from html.parser import HTMLParser

from penstock.serving.openapi import example_request
from tests.support.timing import SOON
from tests.support.triton import serving


class Page(HTMLParser):
    """The links of a page, the cells of its tables, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name == "href" and value]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def fetched(url: str) -> tuple[str, str]:
    with urllib.request.urlopen(url, timeout=SOON) as response:
        return response.headers["content-type"], response.read().decode()


def test_page_shows_models_and_links_to_what_there_is(affine):
    evil = "<script>'\"&"
    with serving({"affine": affine, evil: affine}) as (triton, url, server):
        media_type, text = fetched(f"{url}/")
        assert media_type == "text/html; charset=utf-8"
        page = Page(text)
        assert "script" not in page.tags
        assert {"/v2/models", "/metrics", "/openapi.json"} <= {*page.links}
        assert len(page.links) == 5 + 2 * 3
        for link in page.links:
            assert fetched(url + link)[0]
        for name in ("affine", evil):
            assert f"{name}, version 1" in page.texts
            command = example_request(server.repository.find(name)).curl(f"{url}/", name)
            assert command in page.texts
        for cell in ("x", "FP32", "[-1, 3]", "k", "INT64", "[1]"):
            assert page.texts.count(cell) >= 2
        triton.unload_model(evil)
        assert evil not in fetched(f"{url}/")[1]


def test_page_may_load_nothing(affine):
    with (
        serving({"affine": affine}) as (_, url, _),
        urllib.request.urlopen(f"{url}/", timeout=SOON) as response,
    ):
        assert response.headers["content-security-policy"].startswith("default-src 'none'")
