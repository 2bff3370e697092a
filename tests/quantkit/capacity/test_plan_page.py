"""The page of a plan in Chromium without a network: no request, no message on the console, nothing that overflows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quantkit.cli import main

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Chromium at {CHROMIUM} (apt-get install chromium)"),
]


def test_the_page_opens_offline_and_says_nothing(
    tmp_path: Path, write_config: Callable[..., Path], real_config: Callable[[str], dict[str, Any]]
) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    model = write_config(tmp_path / "<img src=x onerror=alert(1)>", real_config("llama-3-8b"))
    trace, page_file = tmp_path / "trace.jsonl", tmp_path / "plan.html"
    trace.write_text("\n".join(json.dumps({"arrival": i, "prompt_tokens": 50, "output_tokens": 3}) for i in range(20)))
    arguments = ["plan", str(model), "--gpu", "L4,RTX-3090", "--html", str(page_file), "--trace", str(trace)]
    done = CliRunner().invoke(main, [*arguments, "--check", "w4a16-rtn", "--shared-prefix", "500"])
    assert done.exit_code == 0, done.stderr
    complaints: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        for width in (1280, 400):
            page = browser.new_context(viewport={"width": width, "height": 900}, offline=True).new_page()
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: complaints.append(request.url) if "plan.html" not in request.url else 0)
            page.goto(page_file.as_uri())
            assert page.title().startswith("Capacity plan: <img")
            assert page.locator("svg").count() == 8  # weights, cache, and for each device two of speed and one of load
            assert page.locator("img, script").count() == 0
            assert page.get_by_text("not every figure of this device could be confirmed").count() == 1
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
    assert complaints == []
