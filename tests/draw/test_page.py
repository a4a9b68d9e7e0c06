"""Pages of timelines and plans in a real browser: what a reader clicks, types and sees.

Needs chromium and chromedriver, as Debian's chromium and chromium-driver install them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import fxsched
from fxsched import Plan, schedules
from fxsched.models.two_tower import TwoTower, TwoTowerConfig
from fxsched.models.unet import UNet, UNetConfig

selenium = pytest.importorskip("selenium", reason="selenium isn't installed")
from selenium.webdriver import ActionChains, Chrome, ChromeOptions  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select  # noqa: E402

PROGRAMS = [shutil.which(name) for name in ("chromium", "chromedriver")]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        None in PROGRAMS, reason="chromium and chromedriver aren't installed"
    ),
]
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    model = TwoTower(TwoTowerConfig(vocabulary=64, width=16, layers=2))
    code, doc = torch.randint(1, 64, (8, 12)), torch.randint(1, 64, (8, 6))
    schedule = schedules.graph(workers=2, microbatches=4)
    inputs, rate = (code, doc, torch.arange(8) % 2.0), fxsched.Rate(1e8, 1e-5)
    network = fxsched.Network([[0], [1]], rate, rate)
    return fxsched.plan(model, schedule, *inputs, network=network)


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    options = ChromeOptions()
    for option in OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.binary_location = str(PROGRAMS[0])
    browser = Chrome(options, Service(str(PROGRAMS[1])))
    yield browser
    browser.quit()


@pytest.fixture
def page(browser: Chrome, plan: Plan, tmp_path: Path) -> Chrome:
    path = tmp_path / "plan.html"
    plan.diagram().save(path)
    browser.set_window_size(1200, 900)
    browser.get(path.as_uri())
    return browser


def run(browser: Chrome, script: str) -> Any:
    return browser.execute_script(f"return {script}")


def panel(browser: Chrome) -> list[str]:
    return browser.find_element(By.ID, "panel").text.splitlines()


def click_job(browser: Chrome, number: int) -> None:
    """A click in the middle of a job's bar."""
    middle = f"(data.start[{number}] + data.end[{number}]) / 2"
    at = f"[x({middle}), y(data.worker[{number}]) + rowHeight(jobsHeight) / 2]"
    canvas = browser.find_element(By.ID, "over")
    x, y = (
        round(place - canvas.size[size] / 2)
        for place, size in zip(run(browser, at), ("width", "height"), strict=True)
    )
    actions = ActionChains(browser).move_to_element_with_offset(canvas, x, y)
    actions.click().perform()


def test_a_click_shows_the_job_in_the_panel(page: Chrome, plan: Plan) -> None:
    click_job(page, 3)
    bars = plan.diagram().bars
    stage, letter, microbatch = re.findall(r"\d+|[A-Z]", bars.name(3))
    assert panel(page)[0].startswith(f"{bars.name(3)}: ")
    assert f"of stage {stage}, microbatch {microbatch}" in " ".join(panel(page))
    assert {"F": "forward", "B": "backward"}[letter] in panel(page)[0]
    modules = " ".join(panel(page)).split("modules: ")[1]
    assert modules.split(" ..")[0] in plan.stages.nodes[int(stage)]["modules"]
    assert not page.get_log("browser")  # type: ignore[no-untyped-call]


def test_arrow_keys_go_from_job_to_job(page: Chrome, plan: Plan) -> None:
    bars, chart = plan.diagram().bars, page.find_element(By.ID, "chart")
    chart.send_keys(Keys.ARROW_RIGHT)
    assert panel(page)[0].startswith(f"{bars.name(0)}: ")
    chart.send_keys(Keys.ARROW_RIGHT)
    assert panel(page)[0].startswith(f"{bars.name(1)}: ")
    chart.send_keys(Keys.ARROW_DOWN)
    assert "worker 1" in " ".join(panel(page))
    chart.send_keys("+")
    assert run(page, "view.to - view.from") == pytest.approx(bars.span / 2)
    chart.send_keys("0")
    assert run(page, "view.to - view.from") == pytest.approx(bars.span)
    chart.send_keys(Keys.ESCAPE)
    assert panel(page) == ["Click a job, or press an arrow key."]


def test_jobs_are_coloured_by_what_is_chosen(page: Chrome, plan: Plan) -> None:
    bars, select = plan.diagram().bars, Select(page.find_element(By.ID, "colour"))
    colours: dict[str, dict[str, Any]] = {}
    for by in ("microbatch", "stage", "direction"):
        select.select_by_visible_text(by)
        seen = run(page, "data.start.map((_, i) => colour(i))")
        names = [bars.name(i) for i in range(len(bars))]
        colours[by] = dict(zip(names, seen, strict=True))
    first, other_row, other_stage = "0F0", "0F1", "1F0"
    assert colours["microbatch"][first] == colours["microbatch"][other_stage]
    assert colours["microbatch"][first] != colours["microbatch"][other_row]
    assert colours["stage"][first] == colours["stage"][other_row]
    assert colours["stage"][first] != colours["stage"][other_stage]
    assert len(set(colours["direction"].values())) == 2


def test_stages_memory_and_links_are_the_plan_s(page: Chrome, plan: Plan) -> None:
    stages = page.find_element(By.ID, "stages").text
    for stage in plan.stages:
        assert f"stage {stage}, worker" in stages
    edges = page.find_elements(By.CSS_SELECTOR, "#stages path.edge")
    assert len(edges) == plan.stages.number_of_edges()
    rows = page.find_elements(By.CSS_SELECTOR, "#links tr")
    assert [len(row.find_elements(By.XPATH, "*")) for row in rows] == [3, 3, 3]
    peaks = [peak.at_once.total for peak in plan.memory]
    assert run(page, "peaks") == pytest.approx(peaks)
    painted = (
        "[...document.querySelectorAll('#network svg')].map(strip => "
        "[...strip.querySelectorAll('rect')].reduce((sum, rect) => "
        "sum + rect.getBBox().width * rect.getAttribute('opacity') / 1000, 0))"
    )
    found = plan.simulate()
    busy = [link.seconds / found.latency for link in found.links]
    assert run(page, painted) == pytest.approx(busy, abs=0.01)
    assert len(busy) == 4


def test_no_edge_or_text_of_the_stages_is_covered(
    browser: Chrome, tmp_path: Path
) -> None:
    """Also of edges that skip stages."""
    torch.manual_seed(0)
    pictures = torch.randn(8, 3, 16, 16)
    unet, schedule = UNet(UNetConfig(levels=4)), schedules.one_f_one_b(6, 8)
    path = tmp_path / "unet.html"
    plan = fxsched.plan(unet, schedule, pictures, pictures)
    plan.diagram().save(path)
    browser.get(path.as_uri())
    points = run(
        browser,
        "[...document.querySelectorAll('#stages path.edge')].flatMap(path =>"
        "[...Array(200).keys()].map(i => path.getPointAtLength("
        "(i + 0.5) * path.getTotalLength() / 200)).map(p => [p.x, p.y, p.x, p.y]))",
    )
    assert len(points) == 200 * plan.stages.number_of_edges() > 200 * len(plan.stages)
    corners = (
        "[...document.querySelectorAll('#stages %s')].map(each => each.getBBox())"
        ".map(b => [b.x, b.y, b.x + b.width, b.y + b.height])"
    )
    boxes, texts = (
        run(browser, corners % f".{kind}") for kind in ("boxes rect", "edges text")
    )
    for box in boxes:
        assert not any(overlap(box, each) for each in [*texts, *points])
    for i, text in enumerate(texts):
        assert not any(overlap(text, other) for other in texts[:i])


def overlap(one: list[float], other: list[float]) -> bool:
    """Of rectangles: left, top, right, bottom."""
    (a, b, c, d), (e, f, g, h) = one, other
    return a < g and e < c and b < h and f < d


def test_words_of_the_legend_do_not_touch_its_colours(
    browser: Chrome, tmp_path: Path
) -> None:
    path = tmp_path / "step.svg"
    fxsched.simulate(schedules.zb_h1(4, 8)).diagram().save(path)
    wide = path.read_text().replace("Helvetica, Arial, sans-serif", "monospace")
    path.write_text(wide)  # some readers' fonts are as wide
    browser.get(path.as_uri())
    each = "[...document.querySelectorAll('.legend > *')].map(each => each.getBBox())"
    boxes = run(browser, f"{each}.map(b => [b.x, b.x + b.width])")
    gaps = [b[0] - a[1] for a, b in pairwise(boxes[:8])]
    assert min(gaps) > 3


def test_words_do_not_meet_on_a_narrow_screen(browser: Chrome, tmp_path: Path) -> None:
    path = tmp_path / "step.html"
    narrow = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    fxsched.simulate(schedules.zb_h1(4, 8)).diagram().save(path)
    browser.get(path.as_uri())
    caption = "`${data.heldCaption}, at most ${amount(peak)}`"
    context = "Object.assign(base.getContext('2d'), {font: '11px Helvetica, Arial'})"
    assert run(browser, f"{context}.measureText({caption}).width < width")
    legend = "document.querySelector('#legend > span:last-child').getClientRects()"
    assert run(browser, f"{legend}.length") == 1
    assert "to the end of W" in browser.find_element(By.TAG_NAME, "body").text
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_narrow_and_dark_screen_shows_all(page: Chrome) -> None:
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    page.set_window_size(500, 900)
    assert run(page, "document.documentElement.scrollWidth <= innerWidth")
    ground = run(page, "getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", ground))) < 60
    assert run(page, "INK") != run(page, "LABEL")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
