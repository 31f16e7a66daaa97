"""A headless Chromium for tests of pages: that of the system, or Playwright's own.

Tests that use it are skipped where there is none: ``pip install playwright`` and ``playwright
install chromium``, or a package of the system, bring one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def headless_browser() -> Iterator[Any]:
    """A browser of Playwright's; skips the test where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no browser starts here: {str(error).splitlines()[0]}")
        try:
            yield browser
        finally:
            browser.close()


class Page:
    """A page of a report that is open: what the browser complains of, and what it asks for."""

    def __init__(self, browser: Any, address: str) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(viewport={"width": 1300, "height": 800})
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._note)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_function("window.report && window.report.graph.drawings > 0")

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def show(self, view: str) -> None:
        """Click on the tab of a view."""
        self.page.click(f"nav button[data-view={view}]")

    def ask(self, expression: str) -> Any:
        """What an expression of JavaScript is, in the page."""
        return self.page.evaluate(expression)

    def click_at(self, expression: str, *, double: bool = False) -> None:
        """Click on the point of the window that an expression gives."""
        x, y = self.ask(expression)
        self.page.mouse.move(x, y)
        (self.page.mouse.dblclick if double else self.page.mouse.click)(x, y)

    @property
    def details(self) -> str:
        return str(self.page.inner_text("#details h2"))

    def close(self) -> None:
        self.page.close()
