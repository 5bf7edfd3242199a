"""The page of `jaxspec serve` in Chromium, which `make browser` installs with selenium.

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
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WIDTH, MARGIN = 960, 5
"""Width of the picture, and what it shows below the answer, in pixels."""


class Page:
    """Open the page of a server in a browser of its own."""

    def __init__(self, url: str, width: int, scheme: str) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
            options.add_argument(argument)
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(url)
        self.until(lambda: "drafted by" in self.one("#about").text)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def until(self, holds: Callable[[], object]) -> None:
        WebDriverWait(self.driver, 240, 0.05).until(lambda _: holds())

    def script(self, code: str) -> Any:
        return self.driver.execute_script(f"return {code}")


def take_picture(url: str, file: Path) -> None:
    """Ask the server's example question, and write a picture of the page down to its answer."""
    page = Page(url, WIDTH, "light")
    page.until(lambda: page.one("#example").is_displayed())
    page.one("#example").click()
    page.until(lambda: page.all("#pictures img"))
    page.one("#send").click()
    page.until(lambda: "passes" in page.one(".assistant .note").text)
    bottom = page.script(
        "document.querySelector('.assistant .answer').getBoundingClientRect().bottom"
    )
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": bottom + MARGIN, "scale": 1}
    picture = page.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})
    file.write_bytes(b64decode(picture["data"]))
    page.driver.quit()


if __name__ == "__main__":
    take_picture(sys.argv[1], Path(sys.argv[2]))
