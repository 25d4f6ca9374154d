"""The report in a real browser without a network: drawn, quiet, as wide as its window, printable.

One session for all: starting a browser takes longer than what is looked at.
"""

from __future__ import annotations

import re

import pytest

from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.observe.report.gather import gather
from hpctrain.observe.report.page import page
from hpctrain.observe.status.status import Answer, status_of
from tests.support.browser import Browser
from tests.support.report_runs import NASTY, Tale, eventful

pytestmark = pytest.mark.browser
CHARTS = 7
DRAWN = """
return [...document.querySelectorAll(".plot")].map((plot) => {
  const box = plot.querySelector("svg.main-svg").getBoundingClientRect();
  const shapes = plot.querySelectorAll(".trace, .bars .point").length;
  return { key: plot.id, width: box.width, height: box.height, shapes: shapes,
           alt: plot.getAttribute("aria-label") };
});
"""
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
INK = "return getComputedStyle(document.querySelector('#chart-loss .xtick text')).fill;"
COLOURS = f"return [getComputedStyle(document.body).backgroundColor, (() => {{{INK}}})()];"
DRAG = "return document.getElementById('chart-loss')._fullLayout.dragmode"
OFFERED = ["Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"]
BUTTONS = """
const done = arguments[arguments.length - 1], plot = document.getElementById("chart-loss");
const config = { ...plot._context, displayModeBar: true };
Plotly.newPlot(plot, plot.data, plot.layout, config).then(() => done(
  [...plot.querySelectorAll(".modebar-btn")].map((one) => one.dataset.title)));
"""
FOREIGN = """
const done = arguments[arguments.length - 1];
addEventListener("securitypolicyviolation", (refused) => done(refused.effectiveDirective));
new Image().src = "https://example.invalid/seen.png";
"""
DARK_PAPER, LIGHT_INK, DARK_INK = "rgb(20, 24, 30)", "rgb(230, 233, 238)", "rgb(29, 35, 43)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as session:
        yield session


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Paths of the page of an eventful run, and of one that never began."""
    folder = tmp_path_factory.mktemp("pages")
    told = [eventful(folder / "lm").write(), Tale(folder / "idle").submitted().write()]
    found = []
    for run in told:
        events = ledger.read(run)
        status = status_of(RunHistory.of(events), Answer(), name=run.name, now=events[-1].t + 60)
        found.append(gather(run, status))
    texts = {"lm": page(found[0]), "idle": page(found[1])}
    for name, text in texts.items():
        folder.joinpath(f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in texts}


def fits(browser, width):
    """Every chart is there with something in it, and the page never scrolls sideways."""
    charts = browser.ask(DRAWN)
    assert len(charts) == CHARTS
    for chart in charts:
        assert 200 < chart["width"] <= width, chart
        assert chart["height"] > 100, chart
        assert chart["shapes"] > 0, chart
        assert chart["alt"], chart
    assert browser.ask(OVERFLOW) <= 0


def quiet(browser):
    """Nothing was complained of, and nobody was asked for anything but the page itself."""
    assert browser.errors() == []
    asked = [one for one in browser.requests() if not one.startswith("data:")]
    assert asked
    assert all(re.fullmatch(r"file://.*\.html", one) for one in asked), asked


def test_on_a_wide_screen_every_chart_is_drawn_and_nothing_is_asked_for(browser, pages):
    browser.window(1280, 900)

    browser.open(pages["lm"])

    fits(browser, 1280)
    assert NASTY in browser.ask("return document.body.innerText")
    assert browser.ask(DRAG) == "zoom"
    assert browser.ask(BUTTONS, wait=True) == OFFERED, "nothing that uploads"
    quiet(browser)


def test_on_a_dark_phone_it_fits_scrolls_and_is_printed_dark_on_white(browser, pages):
    browser.window(390, 900, phone=True, dark=True)

    browser.open(pages["lm"])

    fits(browser, 390)
    assert browser.ask(DRAG) is False, "a finger scrolls the page"
    assert browser.ask(COLOURS) == [DARK_PAPER, LIGHT_INK]
    browser.ask(
        f"addEventListener('beforeprint', () => {{ window.inked = (() => {{{INK}}})(); }});"
    )
    printed = browser.printed()
    assert printed.startswith(b"%PDF-")
    assert 4 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 12
    assert browser.ask("return window.inked") == DARK_INK
    assert browser.ask(COLOURS) == [DARK_PAPER, LIGHT_INK], "after printing it is as it was"
    quiet(browser)


def test_a_run_that_never_began_is_a_page_too(browser, pages):
    browser.window(1280, 900)

    browser.open(pages["idle"])

    assert browser.ask(DRAWN) == []
    (words,) = browser.ask(
        "return [...document.querySelectorAll('main > p.none')].map(p => p.textContent)"
    )
    assert words
    assert browser.ask(OVERFLOW) <= 0
    quiet(browser)
    # Last, since the browser complains of it.
    assert browser.ask(FOREIGN, wait=True) == "img-src", "the page's own policy refuses"
