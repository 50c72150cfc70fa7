"""A service with fake solvers in a process of its own, and its page in a real browser; the service ends by a kill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from support.browser import watched
from support.ports import free_port
from support.service import client_at
from support.service.serve_process import serve_process

MISSING = "Failed to load resource"  # what the console says of a reply that is an error


class Service:
    """A server on a port that it keeps when it is started again."""

    def __init__(self, folder: Path) -> None:
        self.port, self.folder = free_port(), folder
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = client_at(self.url)
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        self._stack.enter_context(serve_process(self.folder, port=self.port))

    def kill(self) -> None:
        self._stack.close()


class Visitor:
    """A page of the service in a browser. `problems` are what its console says, and requests to others."""

    def __init__(self, browser: Any, service: Service) -> None:
        self.service = service
        self.page = browser.new_page(viewport={"width": 1400, "height": 950})
        self.page.set_default_timeout(100_000)  # ms; on a busy machine
        self.problems = watched(self.page, service.url, "blob:")

    def go(self, path: str, drawn: str) -> Any:
        """Open a part of the page; return it once something is there."""
        self.page.goto(f"{self.service.url}/#{path}")
        self.page.wait_for_selector(drawn)
        return self.page

    def text(self, selector: str) -> list[str]:
        return list(self.page.locator(selector).all_inner_texts())

    def expected(self, prefix: str) -> None:
        """Forget what the console said of errors that were provoked."""
        self.problems[:] = [each for each in self.problems if prefix not in each]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"))
    yield service
    service.client.close()
    service.kill()


@pytest.fixture(scope="module")
def page_of_module(browser: Any, service: Service) -> Iterator[Visitor]:
    visitor = Visitor(browser, service)
    yield visitor
    visitor.page.close()


@pytest.fixture
def visitor(page_of_module: Visitor) -> Iterator[Visitor]:
    yield page_of_module
    assert page_of_module.problems == []


def serious(page: Any) -> list[tuple[str, str]]:
    """What axe finds that keeps people out."""
    found = Axe().run(page).response["violations"]
    return [
        (each["id"], node["html"][:200])
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]
