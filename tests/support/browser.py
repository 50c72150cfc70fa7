"""Pages in a real browser, without a window: Debian's chromium, or Google Chrome."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
WITHIN_MS = 240_000  # on a busy machine
REQUIRED = "OPTPIPE_REQUIRE_BROWSER"  # where it is set, tests fail without a browser instead of being skipped


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser; for one module, because playwright's event loop would disturb tests that run one themselves."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        missing = f"none of {', '.join(NAMES)} is installed, as by: apt-get install chromium"
        pytest.fail(missing) if os.environ.get(REQUIRED) else pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


def new_page(browser: Any, **options: Any) -> Any:
    """A page that is given time on a busy machine."""
    page = browser.new_page(**options)
    page.set_default_timeout(WITHIN_MS)
    return page


def watched(page: Any, *allowed: str) -> list[str]:
    """What a page's console says from now on, and what it asks for beyond addresses that begin with one of these."""
    problems: list[str] = []

    def ask(request: Any) -> None:
        if not request.url.startswith((*allowed, "data:")):
            problems.append(f"asked for {request.url}")

    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    page.on("request", ask)
    return problems


class Opened:
    """A page file in a browser of 1400 by 950 pixels. `problems` are as `watched` tells them."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = new_page(browser, viewport={"width": 1400, "height": 950}, **options)
        self.problems = watched(self.page, path.as_uri())
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("#picture[data-drawn]")

    def text(self, selector: str) -> list[str]:
        """The text of all elements of a selector."""
        return list(self.page.locator(selector).all_inner_texts())

    def close(self) -> None:
        self.page.close()
        assert self.problems == []
