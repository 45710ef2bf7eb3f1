"""Draw the pictures of the pipeline `ppo` in docs/images anew, from Kedro-Viz in Chromium.

Each picture keeps, as the text `pipeline`, a digest of the pipeline that it shows; a test compares the digest with
that of the code.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from kedro.pipeline import Pipeline
from PIL import Image, ImageChops, PngImagePlugin

from ppo_rlhf.pipeline_registry import register_pipelines

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PICTURES = {"flow.png": False, "ppo_flow.png": True}
"""Files, and whether a picture shows the nodes alone, from left to right."""
SHOWN = "pipeline"
PORT, PATIENCE_S, MARGIN = 4143, 120.0, 20


def digest(pipeline: Pipeline, *, nodes_alone: bool) -> str:
    """Return a digest of what a picture shows: the nodes and the datasets between them, or the nodes alone."""
    edges = [
        (node.short_name, [sorted(name for name in side if not name.startswith("param")) for side in sides])
        for node in pipeline.nodes
        for sides in [(node.inputs, node.outputs)]
    ]
    if nodes_alone:
        makers = {name: node for node, (_, outputs) in edges for name in outputs}
        edges = [(node, [sorted({makers[name] for name in inputs if name in makers})]) for node, (inputs, _) in edges]
    return hashlib.sha256(json.dumps(sorted(edges)).encode()).hexdigest()[:16]


def draw(folder: Path) -> None:
    """Save each picture, as Kedro-Viz exports it, in a folder."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((found for name in names if (found := shutil.which(name))), None)
    if program is None:
        raise SystemExit(f"No browser: install one of {', '.join(names)}.")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, nodes_alone in PICTURES.items():
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            types = "&types=nodes" if nodes_alone else ""
            page.goto(f"http://localhost:{PORT}/?pid=ppo&expandAllPipelines=true{types}")
            page.wait_for_selector(".pipeline-node")
            page.click("[aria-label='Change to light theme']")
            if page.locator("text=Dismiss").count():
                page.click("text=Dismiss")
            if nodes_alone:
                page.click("[aria-label='Change flowchart orientation']")
            page.wait_for_timeout(1500)  # the nodes move to their places
            page.click("[aria-label='Export graph as SVG or PNG']")
            with page.expect_download() as download:
                page.click("button:has-text('PNG')")
            download.value.save_as(folder / name)
        browser.close()


def write(drawn: Path, nodes_alone: bool) -> None:
    """Write a picture into docs/images: cut to what it shows, in 32 colours, with the digest."""
    exported = PngImagePlugin.PngImageFile(drawn).convert("RGBA")
    white = Image.new("RGBA", exported.size, "white")
    image = Image.alpha_composite(white, exported).convert("RGB")
    left, top, right, bottom = ImageChops.difference(image, white.convert("RGB")).getbbox() or (0, 0, *image.size)
    edges = left - MARGIN, top - MARGIN, right + MARGIN, bottom + MARGIN
    text = PngImagePlugin.PngInfo()
    text.add_text(SHOWN, digest(register_pipelines()["ppo"], nodes_alone=nodes_alone))
    image.crop(edges).quantize(32).save(IMAGES / drawn.name, optimize=True, pnginfo=text)


def main() -> None:
    """Start Kedro-Viz, and write all pictures."""
    command = [sys.executable, "-m", "kedro", "viz", "run", "--no-browser", "--port", str(PORT)]
    viz = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                urllib.request.urlopen(f"http://localhost:{PORT}/api/main").close()
                break
            except OSError:
                if viz.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("Kedro-Viz did not start.") from None
                time.sleep(1.0)
        with tempfile.TemporaryDirectory() as folder:
            draw(Path(folder))
            for name, nodes_alone in PICTURES.items():
                write(Path(folder) / name, nodes_alone)
    finally:
        viz.terminate()
        viz.wait()


if __name__ == "__main__":
    main()
