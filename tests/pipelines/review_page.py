"""MLflow's review page as a person uses it, driven by Playwright."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGIN, END = "\u2068", "\u2069"  # Unicode's isolates around each line
KEY_MS = 200  # between two keys: nobody types faster, and the list of answers takes its time to open
CLICKS = 3  # of a pair: the list, the answer, Submit; the page then shows the next one


@contextlib.contextmanager
def serving(database: Path) -> Iterator[str]:
    """Serve a database as `kedro mlflow ui` does, until the block ends; yield the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{database}"]
    with subprocess.Popen(
        [*command, "--port", str(port), "--workers", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(1_000):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{address}/health", timeout=5)
                    break
                time.sleep(0.5)
            yield address
        finally:
            server.terminate()


def start_review(page: Any, address: str) -> None:
    """Open a queue's address and begin."""
    page.goto(address, timeout=60_000)
    page.get_by_text("Start review").click(timeout=60_000)
    page.get_by_role("combobox").wait_for(timeout=60_000)


def shown(page: Any) -> list[str]:
    """Return the texts of the page's question and responses, without their headings, as a person reads them."""
    paragraphs = page.evaluate(
        "Array.from(document.querySelectorAll('h2 + *'), text => Array.from(text.querySelectorAll('code'), "
        "line => line.textContent))"
    )
    return ["\n".join(line.removeprefix(BEGIN).removesuffix(END) for line in lines) for lines in paragraphs if lines]


def answer_by_keys(page: Any, value: str) -> int:
    """Answer the pair that is shown with the keyboard alone, as docs/feedback.md says; return the number of keys."""
    keys = 0

    def press(key: str) -> None:
        nonlocal keys
        page.keyboard.press(key)
        page.wait_for_timeout(KEY_MS)
        keys += 1

    def focused() -> list[str]:
        focus: list[str] = page.evaluate("(e => [e.getAttribute('role') || '', e.innerText])(document.activeElement)")
        return focus

    while focused()[0] != "combobox":
        press("Tab")
    press("Enter")
    page.wait_for_function("document.activeElement.getAttribute('role') == 'option'")
    while focused()[1].strip() != value:
        press("ArrowDown")
    press("Enter")
    page.wait_for_function("value => document.querySelector('[role=combobox]').innerText.trim() == value", arg=value)
    page.get_by_role("button", name="Submit", disabled=False).wait_for()  # once it knows of no earlier answer
    while focused()[1] != "Submit":
        press("Tab")
    with page.expect_response(lambda response: "assessments" in response.url and response.ok):
        press("Enter")
    return keys


def answer(page: Any, value: str, rationale: str = "") -> None:
    """Answer the pair that is shown, by the page's own buttons, and wait until it is taken."""
    page.get_by_role("combobox").click()
    page.get_by_role("option", name=value, exact=True).click()
    if rationale:
        page.get_by_placeholder("Rationale (optional)").fill(rationale)
    with page.expect_response(lambda response: "assessments" in response.url and response.ok):
        page.get_by_role("button", name="Submit").click()
