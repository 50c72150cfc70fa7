"""The page of a diagnosis in a real browser: what is clicked is shown in the picture."""

from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from support.browser import Opened, browser
from support.traces.faults import Job, recorded

from optpipe.diagnose import diagnose_recording
from optpipe.diagnose.page import picture

__all__ = ["browser"]  # a fixture

JOB = Job(4, 8, 3, 6, "stages", 1.6, 2, 1, 0, 7)  # stage 2 of 4 takes 1.6 times as long
MARKED = """() => {
  const plot = document.querySelector('.plot');
  const device = (name) => plot.data.filter((trace) => trace.name && trace.name.startsWith(name)).flatMap(({y}) =>
    Array.from({length: y.length / 6}, (_, i) => Math.floor(-y[6 * i])));
  return [device('marked'), device('ops')];
}"""


def test_each_loss_and_each_cell_shows_what_it_is_about(browser: Any, tmp_path: Path) -> None:
    diagnosis = diagnose_recording(recorded(JOB), "csv", "megatron", time_limit_s=0.0)
    picture(diagnosis).save(tmp_path / "page.html")
    opened = Opened(browser, tmp_path / "page.html")
    page = opened.page
    text = page.locator("body").inner_text()
    assert not [word for word in ("kB", "Memory", "emory of", "certified") if word in text]
    assert page.evaluate("() => document.querySelector('.plot').layout.annotations.length") == 2  # as it ran, cured
    shown = []
    for name in ("stages that are uneven", "work"):
        before = page.locator("#picture").get_attribute("data-drawn")
        page.locator(f".loss:has-text('{name}')").last.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#picture:not([data-drawn='{before}'])")
        page.wait_for_function("() => document.querySelector('.plot').textContent.includes('as it ran')")
        shown.append(page.evaluate(MARKED))
    (marked, ops), (none, _) = shown
    assert marked == [2] * (2 * JOB.microbatches)
    assert (len(ops), none) == (4 * 2 * JOB.microbatches, [])
    page.locator(".cell").first.focus()
    for key in ("ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector(".cell[aria-pressed='true'][aria-label^='replica 0, device 1']")
    page.wait_for_function("() => document.querySelector('.plot').data.some(({name}) => name === 'marked')")
    assert set(page.evaluate(MARKED)[0]) == {1}
    serious = [
        each["id"] for each in Axe().run(page).response["violations"] if each["impact"] in ("serious", "critical")
    ]
    assert serious == []
    page.set_viewport_size({"width": 390, "height": 800})
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("() => document.documentElement.scrollWidth") == 390
    opened.close()
