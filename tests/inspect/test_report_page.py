"""The page of a report: what stands in the file, without a browser."""

from __future__ import annotations

import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import penstock.inspect
from penstock.inspect.report_page import _SCRIPTS, D3, report_page

ASSETS = Path(penstock.inspect.__file__).parent / "assets"
SHA256 = "f2094bbf6141b359722c4fe454eb6c4b0f0e42cc10cc7af921fc158fceb86539"  # of dist/d3.min.js in the package d3 7.9.0 of npm


class Collector(HTMLParser):
    """Collects the scripts of a page, and the attributes that name other files."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, Any], str]] = []
        self.addresses: list[str | None] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [
            given[key] for key in ("src", "href", "srcset", "action") if key in given
        ]
        if tag == "link":
            self.addresses.append("link")
        if tag == "script":
            self.scripts.append((given, ""))
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._inside:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data


def parsed(page: str) -> Collector:
    collector = Collector()
    collector.feed(page)
    return collector


def test_d3_is_the_file_that_was_published():
    assert hashlib.sha256((ASSETS / D3).read_bytes()).hexdigest() == SHA256
    assert "permission to use, copy, modify" in " ".join(
        (ASSETS / "d3.LICENSE").read_text().lower().split()
    )


def test_every_asset_is_used():
    used = {*_SCRIPTS, D3, "d3.LICENSE", "report.css", "report.html"}
    assert {path.name for path in ASSETS.iterdir()} == used


def test_page_names_no_other_file_and_forbids_the_network():
    page = report_page({"title": "t"})
    collector = parsed(page)
    assert collector.addresses == []
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.split("; ")[0] == "default-src 'none'"
    assert "http" not in policy


def test_page_has_the_licence_of_d3():
    assert "Copyright 2010-2023 Mike Bostock" in report_page({"title": "t"})


def test_page_without_data_is_a_small_part_of_three_megabytes():
    assert len(report_page({"title": "t"}).encode()) < 400_000


def test_data_with_tags_stay_data():
    document = {
        "title": "</title><script>alert(1)</script>",
        "name": "</script><!-- <b>&amp;\u2028",
    }
    page = report_page(document)
    collector = parsed(page)
    assert len(collector.scripts) == 3  # d3, the data, the programs
    attributes, text = collector.scripts[1]
    assert attributes == {"id": "data", "type": "application/json"}
    assert json.loads(text) == document
    assert "<title>&lt;/title&gt;" in page
