"""The page in Chromium: a picture, an answer in colours, a race, dark, and a phone's width."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests import tiny
from tests.serve.conftest import Served

pytest.importorskip("selenium.webdriver", reason="make browser installs selenium")

from tests.serve.browser import CHROMIUM, DRIVER, Page

if not (CHROMIUM and DRIVER):
    pytest.skip("no chromium; make browser installs it", allow_module_level=True)


@pytest.fixture(params=[(1000, "light"), (1000, "dark"), (360, "light")], ids=str)
def page(served: Served, request: pytest.FixtureRequest) -> Iterator[Page]:
    browser = Page(served.url, *request.param)
    yield browser
    browser.driver.quit()


def test_a_question_with_a_picture_and_a_race(page: Page, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    Image.fromarray(tiny.page(3, 25, 31)).save(picture)
    page.one("#file").send_keys(str(picture))
    page.until(lambda: page.all("#pictures img"))
    page.one("#question").send_keys("What is it?\n")
    page.until(lambda: "passes after the prompt's" in page.one(".assistant .note").text)
    answer = page.one(".assistant .answer")
    assert answer.text
    words = page.script("[...document.querySelectorAll('.drafted')].map(x => x.textContent)")
    assert any(words)
    assert [word for word in words if word[:1].isspace()] == []  # no line under a space
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
    tools = page.script("[...document.querySelectorAll('#tools > button')].map(x => x.offsetTop)")
    assert len({top for top in tools if top}) == 1  # one line of buttons
    ground = page.script("getComputedStyle(document.body).backgroundColor")
    scheme = page.script("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (ground == "rgb(13, 17, 23)") == scheme
    unnamed = "[...document.querySelectorAll('button, input:not([hidden]), textarea, img')]"
    unnamed += ".filter(x => !(x.textContent || x.ariaLabel || x.alt || x.labels?.length)).length"
    assert page.script(unnamed) == 0
    assert page.driver.get_log("browser") == []
