"""Time how soon the service's page shows what the API has, and take its picture for the docs.

Starts a service with a database of its own, opens a job in a browser without a window, and sends the job other costs
again and again. Each makes an incumbent at once. Its event is heard by a client of the API; the page tells when it has
painted it. Needs chromium (`apt-get install chromium`) and the `dev` extra.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from playwright.sync_api import sync_playwright

from benchmarks.page import chromium
from optpipe.errors import OptPipeError

PROBLEM = Path(__file__).parents[2] / "examples" / "problems" / "slowlink-8x16.json"  # not proven at once
CHANGES = 20
# The page has painted an incumbent when the frame after its number has begun.
WATCH = """() => {
  window.painted = {};
  const page = document.querySelector('.page');
  new MutationObserver(() => {
    const seq = page.dataset.seq;
    requestAnimationFrame(() => setTimeout(() => { window.painted[seq] ??= Date.now() / 1000; }));
  }).observe(page, {attributes: true, attributeFilter: ['data-seq']});
}"""
WORKBENCH = "/#/workbench?p=4&m=8&mem=75&k=0.6"


def service_page(
    pictures: Annotated[
        Path | None, typer.Option(help="A folder for workbench.png, a picture of the docs; nothing is timed then.")
    ] = None,
) -> None:
    """Time how soon the service's page shows an incumbent."""
    path = chromium()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        command = [sys.executable, "-m", "optpipe_cli", "serve", "--port", "0", "--solves", "0"]
        command += ["--database", f"sqlite:///{folder}/jobs.sqlite"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as service:
            assert service.stdout
            url = service.stdout.readline().split()[-1]
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            try:
                if pictures:
                    take(browser, url, pictures)
                else:
                    measure(browser, url)
            finally:
                browser.close()
                service.terminate()


def measure(browser: Any, url: str) -> None:
    """Print how long after its event each incumbent is painted."""
    problem = json.loads(PROBLEM.read_text(encoding="utf-8"))
    arrived: dict[int, float] = {}
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        job = client.post("/v1/jobs", json={"problem": problem}).json()
        page = browser.new_page(viewport={"width": 1400, "height": 950})
        page.goto(f"{url}/#/jobs/{job['id']}")
        page.wait_for_selector("[data-seq]")
        page.evaluate(WATCH)
        threading.Thread(target=listen, args=(url, job["url"], arrived), daemon=True).start()
        for change in range(1, CHANGES + 1):
            problem["stages"][0]["forward_ms"] = 10.0 + change / 10
            reply = client.post(f"{job['url']}/problem", json={"problem": problem}).json()
            page.wait_for_selector(f"[data-seq='{reply['best']['seq']}']")
        page.wait_for_timeout(200)
        painted = {int(seq): at for seq, at in page.evaluate("() => window.painted").items()}
        client.delete(job["url"])
    late = sorted(1000 * (painted[seq] - arrived[seq]) for seq in painted if seq in arrived)
    if not late:
        raise OptPipeError("the job ended before its page was open: no incumbent was heard and painted")
    print(f"{len(late)} incumbents of {PROBLEM.stem}, from their event until they are painted:")
    print(f"median {statistics.median(late):.0f} ms, at most {late[-1]:.0f} ms")


def listen(url: str, job: str, arrived: dict[int, float]) -> None:
    """Note when each incumbent's event arrives."""
    with (
        httpx.Client(base_url=url, timeout=None, trust_env=False) as client,
        client.stream("GET", f"{job}/events") as stream,
    ):
        for line in stream.iter_lines():
            if line.startswith("id: "):
                arrived.setdefault(int(line[4:]), time.time())


def take(browser: Any, url: str, folder: Path) -> None:
    """Write the picture of the workbench."""
    page = browser.new_page(viewport={"width": 1200, "height": 1010})
    page.goto(url + WORKBENCH)
    page.wait_for_selector("[data-drawn][data-method]")
    page.wait_for_timeout(500)
    page.screenshot(path=folder / "workbench.png")
    print(f"wrote {folder / 'workbench.png'}")
