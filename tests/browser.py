"""A headless Chromium that looks at the pages of a running TensorBoard."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE = 120
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
# Elements of TensorBoard lie in shadow trees, which a selector alone doesn't look into.
FIND = """
function find(root, selector) {
  const found = [...root.querySelectorAll(selector)];
  for (const element of root.querySelectorAll('*'))
    if (element.shadowRoot) found.push(...find(element.shadowRoot, selector));
  return found;
}
"""


CARDS = "find(document, 'tf-custom-scalar-margin-chart-card, tf-custom-scalar-multi-line-chart-card')"


def missing() -> str | None:
    """Why there is no browser; None where there is one."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)} (Debian packages chromium, chromium-driver)" if lacking else None


@contextmanager
def tensorboard(logs: Path) -> Iterator[str]:
    """The address of a TensorBoard that serves these logs."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if address := re.search(r"http://\S+", line):
                yield address[0]
                break
        else:
            raise AssertionError("".join(said))
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def browser(profile: Path, width: int = 1920, height: int = 1080) -> Iterator["Browser"]:
    """A browser with a new profile, its window of this size: by default that of a full HD screen."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    driver = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """What the tests ask of a page."""

    def __init__(self, driver: Chrome):
        self.driver = driver

    def open(self, address: str) -> None:
        self.driver.get("about:blank")  # else another #page of the same address isn't loaded anew
        self.driver.get(address)

    def ask(self, expression: str):
        """The value of an expression of JavaScript, in which find(document, selector) looks everywhere."""
        return self.driver.execute_script(f"{FIND} return {expression};")

    def wait_for(self, expression: str):
        """The value of an expression as soon as it is true."""
        return WebDriverWait(self.driver, PATIENCE).until(lambda _: self.ask(expression), expression)

    def wait_until_still(self) -> None:
        """Until two pictures, a second apart, are the same: curves grow into place."""
        seen = [self.driver.get_screenshot_as_png()]
        while len(seen) < 2 or seen[-1] != seen[-2]:
            time.sleep(1)
            seen.append(self.driver.get_screenshot_as_png())

    def save(self, path: Path) -> None:
        self.driver.save_screenshot(str(path))
