"""The page works in Chromium, at the widths of a screen and of a phone, light and dark, by
keyboard.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests import tiny
from tests.serve.conftest import Served

pytest.importorskip("selenium.webdriver", reason="make browser installs selenium")

from selenium.webdriver.common.keys import Keys

from tests.serve.browser import CHROMIUM, DRIVER, Page

if not (CHROMIUM and DRIVER):
    pytest.skip("no chromium; make browser installs it", allow_module_level=True)

SCREENS = [(1280, "light"), (390, "dark")]
MARKDOWN = (
    "## A *b*\n\n1. **c** d\n   - <img src=x> &amp; \\*\n\n```\ne\n```\n[f](javascript:1) ![g](h)"
)
FETCH = "(globalThis.fetch = (path, { body } = {}) => !body ? Promise.reject(new Error()) :"
"""Beginning of a function in place of `fetch`, which reaches no server."""
NODES = "<h2>A <em>b</em></h2><ol><li><strong>c</strong> d<ul><li>&lt;img src=x&gt; & *</li></ul>"
NODES += "</li></ol><pre><code>e</code></pre><p>[f](javascript:1) !<a>g</a></p>"


@pytest.fixture(params=SCREENS, ids=str)
def page(served: Served, request: pytest.FixtureRequest) -> Iterator[Page]:
    browser = Page(served.url, *request.param)
    yield browser
    browser.driver.quit()


@pytest.fixture
def brake(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold the batch after some blocks, whose tokens make a word, until this is set."""
    go, lane = threading.Event(), served.worker.batch
    decode, blocks = lane.decode, itertools.count()

    def held(stride: int) -> None:
        if next(blocks) > 2:
            go.wait(60)
        decode(1)  # runs that have grown longer would end the answer

    monkeypatch.setattr(lane, "decode", held)
    yield go
    go.set()


def test_a_question_with_a_picture_and_a_race(page: Page, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    Image.fromarray(tiny.page(3, 25, 31)).save(picture)
    assert page.script("document.activeElement.id") == "question"
    page.one("#file").send_keys(str(picture))
    page.until(lambda: page.all("#pictures img"))
    page.ask("What is it?")
    answer = page.one(".assistant .answer")
    assert answer.text
    words = page.script(
        "[...document.querySelectorAll('.answer .drafted')].map(x => x.textContent)"
    )
    assert any(words)
    assert [word for word in words if word != word.strip()] == []  # no line under a space
    colours = {span.value_of_css_property("color") for span in page.all(".answer span")}
    assert len(colours) > 1
    assert page.one("#spoken").get_attribute("textContent") == answer.text
    assert float(page.one("#per-pass").text) >= 1
    assert float(page.one("#per-second").text) > 0
    assert int(page.one("#context").text.split()[0]) > len("What is it?")

    page.one("#file").send_keys(str(picture))  # a second one, where the server takes one
    page.until(lambda: page.all("#pictures img"))
    page.one("#question").send_keys("Why?", *[Keys.TAB] * 3)
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.until(lambda: page.one(".verdict:not(:empty)").text)
    assert page.one("#problem").text == ""
    assert "at most 256 tokens and 1 picture" in page.one(".cut").text
    assert page.one(".verdict:not(:empty)").text.startswith("identical, ")
    first, second = (lane.text for lane in page.all(".lane .answer"))
    assert first == second
    assert page.script("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.script("document.documentElement.scrollHeight <= window.innerHeight")
    tools = page.script("[...document.querySelectorAll('#tools > button')].map(x => x.offsetTop)")
    assert len({top for top in tools if top}) == 1  # one line of buttons
    ground = page.script("getComputedStyle(document.body).backgroundColor")
    scheme = page.script("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (ground == "rgb(13, 17, 23)") == scheme
    unnamed = "[...document.querySelectorAll('button, input:not([hidden]), textarea, img')]"
    unnamed += ".filter(x => !(x.textContent || x.ariaLabel || x.alt || x.labels?.length)).length"
    assert page.script(unnamed) == 0
    assert page.driver.get_log("browser") == []


@pytest.mark.parametrize("page", SCREENS[:1], ids=str, indirect=True)
def test_a_chat_stays_until_a_new_one(page: Page, brake: threading.Event) -> None:
    """A chat stays until a new one, through a stop, a reload, a wrong number, an edit and a server
    that is gone.
    """
    page.ask("Hi", whole=False)
    page.until(lambda: page.one(".answer span").text)
    page.driver.switch_to.new_window("tab")
    page.open()
    page.ask("Hello", whole=False)
    page.until(lambda: "place 1 in the queue" in page.one(".answer").text)
    page.driver.close()
    page.driver.switch_to.window(page.driver.window_handles[0])
    assert page.one("#log").get_attribute("aria-busy") == "true"
    page.one("#question").send_keys(Keys.ESCAPE)
    page.until(lambda: "stopped" in page.one(".note").text)
    brake.set()
    stopped = page.one(".answer").text
    page.open()
    page.until(lambda: page.all(".answer span"))
    assert page.one(".answer").text == stopped != ""
    page.one(".assistant button:last-child").send_keys(Keys.ENTER)  # again
    page.until(lambda: "stopped" not in page.one("#turns").text and page.rests())
    assert page.one(".answer").text.startswith(stopped)

    page.script("document.getElementById('temperature').value = '-1'")
    page.one(".user button").send_keys(Keys.ENTER)  # edit
    assert page.one("#question").get_attribute("value") == "Hi"
    page.ask(" there")
    assert page.script("document.activeElement.id") == "temperature"
    assert page.one(".wrong").text
    page.one("#temperature").send_keys(Keys.CONTROL, "a", Keys.NULL, "0.05")
    page.ask("")
    assert [question.text for question in page.all(".user .text")] == ["Hi there"]
    assert "seed" in page.one(".note").text

    page.offline(True)
    height = page.one("#question").size["height"]
    page.ask("And" + Keys.SHIFT + 2 * Keys.ENTER + Keys.NULL + "now?")
    page.until(lambda: "the server does not answer" in page.one("#about").text)
    assert page.one("#problem").text == "the server does not answer"
    assert page.one("#question").size["height"] > 2 * height
    page.one("#new").click()
    assert page.one("#problem").text == page.one("#turns").text == ""
    page.offline(False)
    page.until(lambda: "drafted by" in page.one("#about").text)


@pytest.mark.parametrize("page", SCREENS[:1], ids=str, indirect=True)
def test_answers_are_markdown_and_no_html(page: Page) -> None:
    """Answers are Markdown and no HTML, also in a chat kept from before, of which the draft wrote
    all except the ends.
    """
    runs = [[MARKDOWN[:3], "", False], [MARKDOWN[3:-1], "0", False], [MARKDOWN[-1], "", False]]
    answer = {"text": MARKDOWN, "runs": runs, "tokens": [], "ended": True}
    turn = {"text": "Q" * 9000, "pictures": [], "answers": [answer]}
    page.keep({"turns": [turn], "first": 0, "used": 0})
    page.until(lambda: page.all(".answer h2"))
    nodes = "document.querySelector('.answer').innerHTML"
    nodes += ".replace(/<.?span[^>]*>| [a-z]+=\"[^\"]*\"/g, '').replaceAll('&amp;', '&')"
    assert page.script(nodes) == NODES
    assert page.all(".answer img") == []
    drafted = page.script(
        "[...document.querySelectorAll('.answer .drafted')].map(x => x.textContent)"
    )
    assert "".join(drafted).replace(" ", "") == "Abcd<imgsrc=x>&*e[f](javascript:1)!g"

    page.until(lambda: page.script("document.getElementById('newest').hidden"))
    page.script("document.getElementById('log').scrollTop = 0")
    page.until(lambda: page.one("#newest").is_displayed())
    page.script("document.getElementById('question').style.height = '200px'")
    assert page.script("document.getElementById('log').scrollTop") == 0
    page.one("#newest").click()
    page.until(lambda: not page.one("#newest").is_displayed())


@pytest.mark.parametrize("page", SCREENS[:1], ids=str, indirect=True)
def test_nothing_that_was_given_is_lost(page: Page, tmp_path: Path) -> None:
    """Nothing that was given is lost: a picture that takes long to read, a question that fails, or
    the chat of a doubled tab.
    """
    picture = tmp_path / "page.png"
    Image.fromarray(tiny.page(3, 25, 31)).save(picture)
    slow = (
        "(globalThis.createImageBitmap = ((read, gate) => async (file) => (await gate, read(file)))"
    )
    page.script(f"{slow}(createImageBitmap, new Promise((go) => (globalThis.go = go)))) && null")
    page.one("#file").send_keys(str(picture))
    page.offline(True)
    page.ask("What?", whole=False)
    assert page.one("#turns").text == ""
    page.script("go() ?? null")
    page.until(lambda: page.one("#problem").text)
    assert page.one("#question").get_attribute("value") == "What?"
    assert len(page.all("#pictures img")) == 1
    page.script(f"{FETCH} new Promise((_, no) => (globalThis.no = no))) && null")
    page.ask("", whole=False)
    page.one("#question").send_keys("And why?")
    page.script("no(new Error()) ?? null")
    page.until(page.rests)
    assert page.one("#question").get_attribute("value") == "What?\nAnd why?"
    assert len(page.all("#pictures img")) == 1

    page.offline(False)
    said = [{"text": "Hi", "pictures": [], "answers": [answer_of("Ho")]}]
    page.keep({"turns": said, "first": 0, "used": 0})
    page.until(lambda: page.one(".answer").text == "Ho")
    page.one("#question").send_keys("half")
    page.one(".user button").click()  # edit
    assert page.one("#question").get_attribute("value") == "Hi"
    page.one("#keep").click()
    assert page.one("#question").get_attribute("value") == "half"
    page.script("open(location.href) && null")
    page.driver.switch_to.window(page.driver.window_handles[1])
    page.until(lambda: page.one(".answer").text == "Ho")
    page.one("#new").click()
    page.driver.switch_to.window(page.driver.window_handles[0])
    page.open()
    page.until(lambda: page.one(".answer").text == "Ho")


@pytest.mark.parametrize("page", SCREENS[:1], ids=str, indirect=True)
def test_an_answer_without_a_pass_has_no_speed(page: Page) -> None:
    """In a race, an answer of one token has no speed; the next question finds the answer empty if
    it was all reasoning.
    """
    race = {"pictures": [], "race": True}
    lists, thoughts = ([answer_of("0. A", reasons)] * 2 for reasons in (False, True))
    turns = [race | {"text": "Hi", "answers": answers} for answers in (lists, thoughts)]
    page.keep({"turns": turns, "first": 1, "used": 0})
    page.until(lambda: page.all(".verdict")[1].text)
    assert page.all(".verdict")[1].text == "identical"
    assert page.one(".answer ol").get_attribute("start") == "0"
    page.script("(globalThis.asked = []) && null")
    page.script(f"{FETCH} asked.push(body) && Promise.reject(new Error())) && null")
    page.script("document.getElementById('key').dispatchEvent(new Event('change'))")
    page.until(lambda: "the server does not answer" in page.one("#about").text)
    page.ask("Why?", whole=False)
    page.until(lambda: page.script("asked.length"))
    sent = page.script("asked.map(JSON.parse)")[0]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert "undefined" not in page.one(".cut").text


def test_a_browser_that_keeps_nothing_shows_the_page(served: Served) -> None:
    page = Page(served.url, *SCREENS[0], keeps=False)
    try:
        assert (
            page.script("(() => { try { return localStorage } catch { return 'no' } })()") == "no"
        )
        page.ask("Hi")
        assert page.one(".answer").text
        for theme in ("dark", "light"):
            page.one("#theme").click()
            assert page.script("document.documentElement.dataset.theme") == theme
        page.one("#more").click()
        page.one("#most").send_keys("1", Keys.TAB)
        assert page.driver.get_log("browser") == []
    finally:
        page.driver.quit()


@pytest.mark.parametrize(
    "kept", ["null", "{getItem: () => null, setItem() { throw new DOMException('full') }}"]
)
def test_a_browser_without_storage_or_with_a_full_one_shows_the_page(
    served: Served, kept: str
) -> None:
    page = Page(served.url, *SCREENS[0])
    try:
        code = "".join(
            f"Object.defineProperty(window, '{name}', {{value: {kept}}});"
            for name in ("localStorage", "sessionStorage")
        )
        page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": code})
        page.open()
        page.ask("Hi")
        page.one("#theme").click()
        page.one("#more").click()
        page.one("#most").send_keys("1", Keys.TAB)
        assert page.driver.get_log("browser") == []
    finally:
        page.driver.quit()


def test_the_page_tells_when_a_server_that_warmed_up_again_is_ready(
    page: Page, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.worker, "ready", threading.Event())
    page.script("document.querySelector('#key').dispatchEvent(new Event('change'))")
    page.until(lambda: page.one("#about").text.startswith("warming up"))
    served.worker.ready.set()
    page.until(lambda: "drafted by" in page.one("#about").text)


def answer_of(text: str, reasons: bool = False) -> dict[str, Any]:
    """Return a whole answer of one token, in the page's form."""
    times = {"passes": 0, "emitted": 0, "decode_ms": 0, "prefill_ms": 1}
    runs = [[text, "", reasons]]
    return {"text": "" if reasons else text, "runs": runs, "tokens": [1], "ended": True} | times
