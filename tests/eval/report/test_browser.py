"""The page in Chromium without a network: no request, no error, a filter that works, nothing wider than the window."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit_eval.report import ReportInput, write_report

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Chromium at {CHROMIUM} (apt-get install chromium)"),
]
LONG = "w" * 3000 + " مرحبا 👩🏽\u200d🚀 </pre><script>document.title = 'broken'</script>"
LONG += "<img src=x onerror=\"document.title='broken'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[[str], ReportInput], make_flip: Any) -> Path:
    """A folder with a page of each kind; ``hard`` has long unbreakable names and hostile outputs."""
    folder = tmp_path_factory.mktemp("pages")
    for kind in ("fail", "pass", "inconclusive", "aa"):
        write_report(make_run(kind), folder / f"{kind}.html", None, None)
    run = make_run("fail")
    flips = [make_flip(i, LONG, {"name": LONG}, f"{LONG} {i}", f"{i} {LONG}")[2] | {"id": "i" * 300} for i in range(30)]
    gate = run.verdict["gates"][0] | {"suite": "s" * 200, "metric": "m" * 200, "name": "n" * 200, "reason": "r" * 400}
    hard = run.verdict | {"flipped": flips, "gates": [gate], "reason": "because" * 60}
    model = run.candidate | {"model": {"name": "n" * 200, "scheme": "W4A16" * 20, "checkpoint_hash": "f" * 200}}
    checkpoint = {**(run.checkpoint or {}), "recipe": "k" * 500}
    made = dataclasses.replace(run, verdict=hard, candidate=model, checkpoint=checkpoint)  # type: ignore[arg-type]
    write_report(made, folder / "hard.html", None, None)
    return folder


@contextlib.contextmanager
def opened(browser: Any, path: Path, width: int = 1280, **options: Any) -> Iterator[Any]:
    """The page, with the network blocked; whatever it asks for or complains about fails the test."""
    context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, **options)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    yield page
    context.close()
    assert complaints == []


@pytest.mark.parametrize("kind", ["fail", "inconclusive", "aa", "hard"])
def test_opens_offline_and_fits(kind: str, browser: Any, pages: Path) -> None:
    with opened(browser, pages / f"{kind}.html") as page:
        assert page.title().endswith("quantkit report")
        assert page.locator("script").count() == 1
        assert page.locator("img").count() == 0
        for folded in (True, False):
            if not folded:
                page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
            for width in (1280, 390):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                wide = page.evaluate(
                    """width => [...document.querySelectorAll('body *')].filter(e => {
                         const box = e.getBoundingClientRect();
                         return box.width && box.right > width + 1 && !e.closest('.scroll, .visually-hidden');
                       }).map(e => e.tagName + '.' + e.getAttribute('class'))""",
                    width,
                )
                assert wide == []


def test_filter(browser: Any, pages: Path, make_run: Callable[[str], ReportInput]) -> None:
    run = make_run("pass")
    with opened(browser, pages / "pass.html") as page:
        shown = page.locator("#items details.item:visible")
        assert shown.count() == 5
        assert page.locator("#shown").inner_text() == "5 items"
        page.get_by_label("Direction").select_option("regressed")
        assert shown.count() == 2
        page.get_by_label("Direction").select_option("improved")
        assert shown.count() == 3
        assert page.locator("#shown").inner_text() == "3 of 5 shown"
        target = next(flip for flip in run.verdict["flipped"] if flip["direction"] == "improved")
        page.get_by_label("Text").fill(f"  {target['id'].upper()} ")
        assert shown.count() == 1
        assert target["id"] in shown.inner_text()
        page.get_by_label("Suite").select_option("extract")
        assert shown.count() == 1
        page.get_by_label("Text").fill("no such text anywhere")
        assert shown.count() == 0
        assert page.locator("#shown").inner_text() == "0 of 5 shown"
        page.get_by_label("Text").press("Enter")
        assert page.url == (pages / "pass.html").as_uri(), "Enter in the search field must not leave the page"


def test_filter_finds_what_is_folded_away(browser: Any, pages: Path, make_run: Callable[[str], ReportInput]) -> None:
    last = make_run("fail").verdict["flipped"][-1]
    with opened(browser, pages / "fail.html") as page:
        shown = page.locator("#items details.item:visible")
        assert shown.count() == 20
        page.get_by_label("Text").fill(last["id"])
        assert shown.count() == 1
        page.get_by_role("button", name="Open all shown").click()
        assert shown.locator("pre").last.is_visible()
        assert last["candidate_output"] in shown.locator("pre").last.inner_text()


def test_list_without_javascript(browser: Any, pages: Path) -> None:
    with opened(browser, pages / "fail.html", java_script_enabled=False) as page:
        assert not page.locator("#filter").is_visible()
        assert page.locator("#items details.item:visible").count() == 20
        page.get_by_text("Show 9 more").click()
        assert page.locator("#items details.item:visible").count() == 29


def test_keyboard_reaches_the_items(browser: Any, pages: Path) -> None:
    with opened(browser, pages / "fail.html") as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "content"
        summary = page.locator("#items details.item:not([open]) > summary").first
        item = summary.element_handle().query_selector("xpath=..")
        summary.focus()
        page.keyboard.press("Enter")
        assert item.evaluate("item => item.open")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_drawings_follow_the_colour_scheme(scheme: str, browser: Any, pages: Path) -> None:
    with opened(browser, pages / "fail.html", color_scheme=scheme) as page:
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        label = page.evaluate("getComputedStyle(document.querySelector('figure svg .label')).fill")
        lightness = [sum(int(part) for part in colour[4:-1].split(",")) for colour in (ground, label)]
        assert (lightness[0] > lightness[1]) == (scheme == "light")


def test_prints_the_gates_on_paper(browser: Any, pages: Path, tmp_path: Path) -> None:
    with opened(browser, pages / "fail.html", width=690) as page:
        page.emulate_media(media="print")
        assert page.locator("table.gates thead").is_visible()
        assert not page.locator("#filter").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 690
        page.pdf(path=str(tmp_path / "page.pdf"), format="A4")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
