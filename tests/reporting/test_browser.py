"""The report and the token view in a real browser: drawn, quiet, and as wide as the screen."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs_version

from ppo_rlhf.reporting.charts import PANELS
from ppo_rlhf.reporting.report_page import PLOTLY
from ppo_rlhf.reporting.token_view import render_page
from ppo_rlhf.reporting.token_view.page import QUANTITIES
from tests.reporting.test_report import before_after, run_reporting

WORDS = ["the", "film", "was", "a", "slow", "and", "unbelievably_long_word_that_no_line_has_room_for"]
NUMBERS = {quantity.name: [0.5, -0.2, 0.0, 1.5, -3.0, 0.1, 0.2] for quantity in QUANTITIES}
SAMPLE = {"prompt": "once", "tokens": [f" {word}" for word in WORDS], "is_policy": [True] * 7, "score": 1.0}
SAMPLES: Any = [{"iteration": 3, "responses": 64, "samples": [{**SAMPLE, "terminated": True, "numbers": NUMBERS}]}]
VALUES = {"kl": (0.0, 14.4), "cut_off_rate": (0.938, 0.938), **{f"kind_{n}_rate": (0.5, 0.5) for n in range(5)}}
MEASURES = before_after(**VALUES).assign(sft_se=0.062, ppo_se=0.062, change_se=0.066)
MEASURES.loc[0, ["sft", "sft_se"]] = -0.03, 0.02


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((found for name in names if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    report = run_reporting(token_samples=SAMPLES, before_after=MEASURES)["report"]
    for name, page in (("report", report), ("token_view", render_page(SAMPLES))):
        (folder / f"{name}.html").write_text(page)
    return {file.stem: file for file in folder.iterdir()}


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize(("name", "charts"), [("report", len(PANELS) + 1), ("token_view", 0)])
def test_a_page_is_drawn_without_errors_requests_and_horizontal_scroll(browser, pages, name, charts, width):
    with browser.new_page(viewport={"width": width, "height": 844}, is_mobile=width == 390) as page:
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(pages[name].as_uri(), wait_until="networkidle")
        page.wait_for_function(
            "n => document.querySelectorAll('.js-plotly-plot:has(.trace path, .trace .point)').length == n",
            arg=charts,
            timeout=20_000,
        )
        assert said == []
        assert asked == [pages[name].as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") == page.evaluate("innerWidth") == width
        hidden = "Array.from(document.querySelectorAll('.scroll'), box => box.scrollWidth - box.clientWidth)"
        assert set(page.evaluate(hidden)) <= {0}  # the column Change is in sight
        if name == "report" and width == 1400:
            row = page.locator(".measures tr", has_text="Cut off").locator("td")
            assert row.last.inner_text() == "0 ±\u00a06.6 points"
            assert row.last.bounding_box()["height"] < 1.9 * 16 * 1.55  # of two lines it would be 3 of 1.55 em
        page.locator(".token").first.click()
        assert page.locator(".tip").is_visible()


CONTRASTS = """() => {
  const channel = (part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b) + 0.05;
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const over = (top, below, alpha = top[3] ?? 1) => below.map((part, i) => alpha * top[i] + (1 - alpha) * part);
  const behind = (element) => {
    if (!element) return [255, 255, 255].map((part) => matchMedia("(prefers-color-scheme: dark)").matches ? 18 : part);
    return over(parts(getComputedStyle(element).backgroundColor), behind(element.parentElement));
  };
  const kinds = ".js-plotly-plot text, .token, .token-view .prompt, .scale b, .about, td, .soft";
  return Array.from(document.querySelectorAll(kinds), (text) => {
    const style = getComputedStyle(text), paper = behind(text);
    const colour = text.tagName == "text" ? style.fill : style.color;
    const ink = over(parts(colour).slice(0, 3), paper, Number(style.opacity));
    const pair = [light(ink), light(paper)];
    return [Math.max(...pair) / Math.min(...pair), text.tagName == "text" ? "chart" : text.className];
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["report", "token_view"])
def test_every_text_has_the_contrast_that_wcag_asks(browser, pages, name, scheme):
    with browser.new_page(viewport={"width": 1400, "height": 844}, color_scheme=scheme) as page:
        page.goto(pages[name].as_uri(), wait_until="networkidle")
        found = page.evaluate(CONTRASTS)
    assert {kind for _, kind in found} >= ({"chart", "token", "prompt"} if name == "report" else {"token", "prompt"})
    assert [each for each in found if each[0] < 4.5] == []  # the least for small text, WCAG 2.2, 1.4.3


def test_a_value_and_its_error_are_not_torn_apart_on_a_phone(browser, pages):
    with browser.new_page(viewport={"width": 390, "height": 844}, is_mobile=True) as page:
        page.goto(pages["report"].as_uri(), wait_until="networkidle")
        cells = page.locator(".measures td", has_text="−0.03")
        assert cells.first.inner_text() == "−0.03 ±\u00a00.02"
        assert cells.first.bounding_box()["height"] < 1.9 * 16 * 1.55


def test_the_chart_beside_the_table_fills_its_card(browser, pages):
    with browser.new_page(viewport={"width": 1400, "height": 844}) as page:
        page.goto(pages["report"].as_uri(), wait_until="networkidle")
        card, chart = (page.locator(f".pair figure{inner}").bounding_box() for inner in ("", " .main-svg >> nth=0"))
        assert card["y"] + card["height"] - chart["y"] - chart["height"] < 30


def test_the_script_of_the_charts_is_npms_in_the_version_that_plotly_draws_for():
    script, told = PLOTLY.read_bytes(), (PLOTLY.parent / "README.md").read_text()
    assert hashlib.sha256(script).hexdigest() in told
    assert f"v{get_plotlyjs_version()}\n".encode() in script[:100]
    assert "MIT License" in (PLOTLY.parent / "LICENSE").read_text()


def test_a_report_takes_less_than_two_megabytes(pages):
    assert pages["report"].stat().st_size < 2_000_000
