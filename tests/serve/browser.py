"""Drive the page of `jaxspec serve` in Chromium, which `make browser` installs with selenium.

The picture of the page in the README, docs/serve.png, is made of a running server:

    jaxspec serve --demo --port 8000
    python -m tests.serve.browser http://127.0.0.1:8000 docs/serve.png
"""

from __future__ import annotations

import shutil
import sys
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WIDTH, HEIGHT, SCALE = 960, 720, 2
"""Size of the picture in CSS pixels, and how many pixels of the file each of them takes."""
PASSING = (NoSuchElementException, StaleElementReferenceException, IndexError)
"""Errors about nodes that are not there yet, or have just been drawn anew."""
KEEP = """
const [chat, done] = arguments;
indexedDB.open("jaxspec").onsuccess = ({ target: { result } }) => {
  const store = result.transaction("chats", "readwrite").objectStore("chats");
  store.put(chat, +sessionStorage.getItem("chat")).onsuccess = () => done();
};
"""


class Page:
    """Open the page of a server in a browser of its own."""

    def __init__(
        self,
        url: str,
        width: int,
        scheme: str,
        height: int = 800,
        scale: int = 1,
        keeps: bool = True,
    ) -> None:
        """Open the page in a browser; `keeps` says whether it lets pages keep anything."""
        options = webdriver.ChromeOptions()
        if not keeps:
            blocked = {"profile.default_content_setting_values.cookies": 2}
            options.add_experimental_option("prefs", blocked)
        options.binary_location = CHROMIUM
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
            options.add_argument(argument)
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": height, "deviceScaleFactor": scale}
        size["mobile"] = width < 500
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.url = url
        self.open()

    def open(self) -> None:
        """Open the page, or open it again."""
        self.driver.get(self.url)
        self.until(lambda: "drafted by" in self.one("#about").text)

    def ask(self, text: str, whole: bool = True) -> None:
        """Write into the box and press Enter; wait for the whole answer."""
        self.one("#question").send_keys(text, Keys.ENTER)
        if whole:
            self.until(self.rests)

    def rests(self) -> bool:
        """Return whether no answer is being written."""
        return self.one("#send").text == "Ask"

    def offline(self, yes: bool) -> None:
        """Cut the page off from its server, or let it reach it again."""
        self.driver.set_network_conditions(offline=yes, latency=0, throughput=-1)

    def keep(self, chat: dict[str, Any]) -> None:
        """Open the page again with this chat kept from before."""
        self.driver.execute_async_script(KEEP, chat)
        self.open()

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def until(self, holds: Callable[[], object]) -> None:
        WebDriverWait(self.driver, 240, 0.05, PASSING).until(lambda _: holds())

    def script(self, code: str) -> Any:
        return self.driver.execute_script(f"return {code}")


def take_picture(url: str, file: Path) -> None:
    """Race the server's example question, and write a picture of the page with both answers."""
    page = Page(url, WIDTH, "light", HEIGHT, SCALE)
    page.until(lambda: page.one("#example").is_displayed())
    page.one("#example").click()
    page.until(lambda: page.all("#pictures img"))
    page.one("#race").click()
    page.until(lambda: page.one(".verdict").text and page.rests())
    page.script("document.activeElement.blur()")
    picture = page.driver.execute_cdp_cmd("Page.captureScreenshot", {})
    file.write_bytes(b64decode(picture["data"]))
    page.driver.quit()


if __name__ == "__main__":
    take_picture(sys.argv[1], Path(sys.argv[2]))
