"""A headless Chromium that sees no network: loads a page, tells of errors and of what it asked for.

Driven by selenium with the machine's own chromedriver; nothing is downloaded.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pathlib import Path

    from selenium.webdriver import Chrome

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
READY_S = 60.0
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"),
)


def missing() -> list[str]:
    """What this machine lacks for a browser; empty when one can be started."""
    absent = [] if _browser() else [BROWSERS[0]]
    return absent if shutil.which(DRIVER) else [*absent, DRIVER]


def _browser() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


class Browser:
    """One session; use it as a context."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = _browser() or ""
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(executable_path=shutil.which(DRIVER))
        self.driver: Chrome = webdriver.Chrome(options=options, service=service)
        self.driver.set_script_timeout(READY_S)
        # The browser's own first page asks for parts of itself.
        self.driver.get("about:blank")
        self.requests()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.driver.quit()

    def window(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        """A window of this many CSS pixels; a phone's has a finger instead of a mouse."""
        metrics = {"width": width, "height": height, "mobile": phone}
        scale = {"deviceScaleFactor": 2 if phone else 1}
        self.call("Emulation.setDeviceMetricsOverride", **metrics, **scale)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path) -> None:
        """Load a page of the disk and wait until its charts are drawn."""
        self.driver.get(page.absolute().as_uri())
        self.ask(
            """
            const done = arguments[arguments.length - 1], root = document.documentElement;
            const drawn = () => root.dataset.charts === "drawn" || !document.querySelector(".plot");
            if (drawn()) { done(true); return; }
            new MutationObserver(() => drawn() && done(true)).observe(root, { attributes: true });
            """,
            wait=True,
        )

    def ask(self, script: str, *, wait: bool = False) -> Any:
        """Run a script in the page; with `wait` until it calls its last argument."""
        run = self.driver.execute_async_script if wait else self.driver.execute_script
        return run(script)

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        """A command of the browser's own protocol."""
        answer: dict[str, Any] = self.driver.execute_cdp_cmd(command, arguments)
        return answer

    def errors(self) -> list[str]:
        """What the console has said since the last call, but for plain news."""
        said = self.driver.get_log("browser")
        return [entry["message"] for entry in said if entry["level"] in {"SEVERE", "WARNING"}]

    def requests(self) -> list[str]:
        """The addresses that pages have asked for since the last call."""
        said = self.driver.get_log("performance")
        entries = [json.loads(one["message"])["message"] for one in said]
        sent = [one for one in entries if one["method"] == "Network.requestWillBeSent"]
        return [one["params"]["request"]["url"] for one in sent]

    def picture(self, target: Path) -> None:
        """The whole page as an image, for people."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        target.write_bytes(base64.b64decode(shot["data"]))

    def printed(self) -> bytes:
        """The page as a PDF on A4."""
        paper = {"paperWidth": 8.27, "paperHeight": 11.69, "preferCSSPageSize": True}
        answer = self.call("Page.printToPDF", printBackground=True, **paper)
        return base64.b64decode(answer["data"])


if __name__ == "__main__":
    sys.exit(bool(missing()))
