"""The page in Chromium: a picture, an answer in colours, a race, dark, and a phone's width."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests import tiny
from tests.serve.conftest import Served

webdriver = pytest.importorskip("selenium.webdriver", reason="make browser installs selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not (CHROMIUM and DRIVER):
    pytest.skip("no chromium; make browser installs it", allow_module_level=True)


class Page:
    """The page of a server in a browser of its own."""

    def __init__(self, served: Served, width: int, scheme: str) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
            options.add_argument(argument)
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(served.url)
        self.until(lambda: "drafted by" in self.one("#about").text)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def until(self, holds: Callable[[], object]) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 240, 0.05).until(lambda _: holds())

    def script(self, code: str) -> Any:
        return self.driver.execute_script(f"return {code}")


@pytest.fixture(params=[(1000, "light"), (1000, "dark"), (390, "light")], ids=str)
def page(served: Served, request: pytest.FixtureRequest) -> Iterator[Page]:
    shown = Page(served, *request.param)
    yield shown
    shown.driver.quit()


def test_a_question_with_a_picture_and_a_race(page: Page, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    Image.fromarray(tiny.page(3, 25, 31)).save(picture)
    page.one("#file").send_keys(str(picture))
    page.until(lambda: page.all("#pictures img"))
    page.one("#question").send_keys("What is it?\n")
    page.until(lambda: "passes" in page.one(".assistant .note").text)
    answer = page.one(".assistant .answer")
    assert answer.text
    assert page.all(".answer .drafted")
    colours = {span.value_of_css_property("color") for span in page.all(".answer span")}
    assert len(colours) > 1
    assert float(page.one("#per-pass").text) >= 1
    assert float(page.one("#per-second").text) > 0

    page.one("#question").send_keys("Why?")  # a turn that follows, and the picture with it
    page.one("#race").click()
    page.until(lambda: page.one(".verdict").text or page.one("#problem").text)
    assert page.one("#problem").text == ""
    assert page.one(".verdict").text.startswith("identical, ")
    first, second = (lane.text for lane in page.all(".lane .answer"))
    assert first == second
    assert page.script("document.documentElement.scrollWidth <= window.innerWidth")
    ground = page.script("getComputedStyle(document.body).backgroundColor")
    scheme = page.script("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (ground == "rgb(13, 17, 23)") == scheme
    unnamed = "[...document.querySelectorAll('button, input:not([hidden]), textarea, img')]"
    unnamed += ".filter(x => !(x.textContent || x.ariaLabel || x.alt || x.labels?.length)).length"
    assert page.script(unnamed) == 0
    assert page.driver.get_log("browser") == []
