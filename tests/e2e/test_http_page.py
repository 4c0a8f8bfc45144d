"""The bundled model over HTTP: OpenAI's client, and the page in a browser: generate, watch, cancel, play a clip, see an
error, on a phone, with a key."""

from __future__ import annotations

import base64
import io
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import shapes_scene as scenes
import shapes_scorer as scorer
from http_server import Server, serving
from PIL import Image
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from processes import leftovers, run_root, wait_until

from diffgen import DiffGenerator

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The Sora API")]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
# Kept for looking at where this is set: a folder.
SCREENSHOTS = os.environ.get("SCREENSHOTS")


@pytest.fixture(scope="module")
def bundled_server() -> Iterator[Server]:
    """``diffgen serve`` with the bundled model. The last test of this file kills it."""
    with run_root() as root:
        with serving(root, "--data-path", str(root / "data")) as server:
            yield server
        wait_until(lambda: leftovers(root) == [], 10, "nothing is left")


expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        flags = [*FLAGS, "--disable-sync"]
        with playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=flags) as browser:
            yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of 1200 x 800 whose console must stay empty, but for answers that are errors."""
    with browser.new_page(viewport={"width": 1200, "height": 800}) as page:
        page.set_default_timeout(60_000)
        told: list[str] = []
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("dialog", lambda dialog: told.append(f"dialog: {dialog.message}"))
        yield page
        assert [text for text in told if "Failed to load resource" not in text] == []


def shot(page: Page, name: str) -> None:
    if SCREENSHOTS:
        Path(SCREENSHOTS).mkdir(exist_ok=True)
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png", full_page=True)


def generate(page: Page, prompt: str, **fields: object) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    for label, value in fields.items():
        page.get_by_label(label, exact=True).fill(str(value))
    page.keyboard.press("Control+Enter")


def test_openai_client(bundled_server: Server) -> None:
    client = bundled_server.client()
    assert [model.id for model in client.models.list()] == ["shapes"]
    extra = {"seed": 3, "num_inference_steps": 12, "guidance_scale": 4.0}
    asked: dict[str, Any] = {"prompt": "a red circle on a blue background", "size": "128x128", "n": 2}
    whole = client.images.generate(**asked, extra_body=extra)
    *partial, first, second = client.images.generate(**asked, stream=True, partial_images=2, extra_body=extra)
    assert [event.type for event in partial] == ["image_generation.partial_image"] * 2
    assert [first.b64_json, second.b64_json] == [item.b64_json for item in whole.data]
    with DiffGenerator.connect(bundled_server.url) as remote:
        pixels = remote.generate(**asked, num_frames=1, **extra).pixels[:, 0]
    for item, expected in zip(whole.data, pixels, strict=True):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(item.b64_json)))), expected)
    assert scorer.score(scenes.Scene("blue", (scenes.Thing("red", "circle"),)), pixels[:1])["background"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.edit(image=whole.data[0].b64_json.encode(), prompt="a")
    assert caught.value.code == "image_decode_failed"
    clip = {"seed": 1, "num_inference_steps": 4, "num_frames": 5}
    made = client.videos.create_and_poll(prompt="a red circle moving up", size="64x64", extra_body=clip)
    assert (made.status, made.progress, made.model) == ("completed", 100, "shapes")
    assert client.videos.download_content(made.id).read()[4:8] == b"ftyp"
    client.videos.delete(made.id)
    assert list(client.videos.list()) == []


def test_generate_watch_cancel_and_play(bundled_server: Server, page: Page) -> None:
    page.goto(bundled_server.url)
    expect(page.locator("#state")).to_have_text("shapes is ready")
    page.get_by_text("More", exact=True).click()
    page.get_by_label("output format").select_option("webp")
    generate(page, "a red circle on a blue background", Steps=40, Seed=1)
    card = page.locator("article").first
    expect(card.locator("img.preview")).to_be_visible()
    assert 0 < float(card.locator("progress").get_attribute("value") or 0) < 100
    shot(page, "1-preview")
    expect(card.locator("img:not(.preview)")).to_be_visible()
    expect(card.locator("dl")).to_contain_text("seed1")
    assert (card.locator("img").get_attribute("src") or "").startswith("data:image/webp")
    assert page.evaluate("document.querySelector('article img').naturalWidth") == 128
    expect(card.locator(".work")).to_be_hidden()

    generate(page, "<img src=x onerror=alert(1)>", Steps=900)
    card = page.locator("article").first
    expect(card.locator(".told")).to_contain_text("denoise")
    card.get_by_role("button", name="Cancel").click()
    expect(card.locator(".error")).to_have_text("Cancelled.")
    expect(card.locator(".text")).to_have_text("<img src=x onerror=alert(1)>")
    wait_until(lambda: bundled_server.http.get("/v1/status").json()["requests"] == [], 10, "the work has stopped")

    card.get_by_role("button", name="Use again").click()
    assert page.get_by_label("Steps", exact=True).input_value() == "900", "as it was asked, nothing being resolved"

    exact = {"Seed": 2**53 + 1, "Guidance": ".5", "Width": "064", "Height": 64}
    generate(page, "x" * 20_001, Steps=1, **exact)
    card = page.locator("article").first
    expect(card.locator(".error")).to_contain_text("prompt has 20001 characters")
    page.get_by_label("Seed", exact=True).fill("")
    card.get_by_role("button", name="Use again").click()
    assert page.get_by_label("Seed", exact=True).input_value() == str(2**53 + 1)
    card.get_by_role("button", name="Remove").click()
    expect(card.locator(".error")).to_have_text("Cancelled.")
    generate(page, "a red circle", Steps=1)
    expect(card.locator("dl")).to_contain_text(f"guidance0.5seed{2**53 + 1}")
    for label in exact:
        page.get_by_label(label, exact=True).fill("")
    card.get_by_role("button", name="Remove").click()

    page.get_by_label("Clip", exact=True).check()
    generate(page, "a white triangle moving right on a purple background", Steps=60, Frames=5)
    card = page.locator("article").first
    expect(card.locator("img.preview")).to_be_visible()
    shot(page, "1-clip-preview")
    video = card.locator("video")
    expect(video).to_be_visible()
    expect(card.locator("dl")).to_contain_text("frames5")
    video.evaluate("async (video) => { video.currentTime = 0; await video.play(); }")
    wait_until(lambda: video.evaluate("(video) => video.currentTime") > 0.1, 10, "it plays")
    assert video.evaluate("(video) => [video.videoWidth, video.videoHeight]") == [128, 128]
    shot(page, "2-clip")

    page.locator("article").last.get_by_role("button", name="Use again").click()
    assert page.get_by_label("Steps", exact=True).input_value() == "40"
    assert page.get_by_label("Image", exact=True).is_checked()
    assert page.get_by_label("output format").input_value() == "webp"

    other = {"prompt": "a", "size": "64x64", "num_frames": 5, "num_inference_steps": 1}
    for _ in range(20):
        bundled_server.post(other, "/v1/videos")
    page.reload()
    expect(page.locator("article .text")).to_have_text(["a"] * 20)  # the newest
    for job in bundled_server.http.get("/v1/videos", params={"limit": 20}).json()["data"]:
        bundled_server.http.delete(f"/v1/videos/{job['id']}")
    page.reload()
    expect(page.locator("article video")).to_be_visible()  # the server keeps its clips
    # A cancel that does not reach the server is not one.
    page.context.set_offline(True)
    page.locator("article").first.get_by_role("button", name="Remove").click()
    expect(page.locator("article .error").first).to_have_text("The server cannot be reached.")
    page.context.set_offline(False)
    page.locator("article").first.get_by_role("button", name="Remove").click()
    expect(page.locator("article")).to_have_count(0)
    assert bundled_server.http.get("/v1/videos").json()["data"] == []


def test_a_clip_that_is_cancelled_before_it_is_a_job(bundled_server: Server, page: Page) -> None:
    """As on a slow line: the answer that tells the job's id comes after the cancel, or after the card was removed."""
    page.goto(bundled_server.url)
    expect(page.locator("#state")).to_have_text("shapes is ready")
    held: list[Route] = []
    ask = bundled_server.http.get
    page.route("**/v1/videos", lambda route: held.append(route))
    page.get_by_label("Clip", exact=True).check()
    for name in ("Cancel", "Remove"):
        generate(page, "a", Steps=900, Frames=81)
        card = page.locator("article").first
        card.get_by_role("button", name=name).click()
        wait_until(lambda: page.evaluate("1") and held, 10, "it is on its way")
        answer = held[-1].fetch()
        assert answer.json()["status"] == "queued"
        held.pop().fulfill(response=answer)
        if name == "Cancel":
            expect(card.locator(".error")).to_have_text("Cancelled.")
            card.get_by_role("button", name="Remove").click()
        expect(page.locator("article")).to_have_count(0)
        wait_until(lambda: page.evaluate("1") and ask("/v1/videos").json()["data"] == [], 10, "the job is deleted")
        wait_until(lambda: ask("/v1/status").json()["requests"] == [], 10, "the work has stopped")


def test_phone_and_keyboard(bundled_server: Server, page: Page) -> None:
    page.set_viewport_size({"width": 375, "height": 720})
    page.goto(bundled_server.url)
    expect(page.locator("#state")).to_have_text("shapes is ready")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375, "nothing reaches beyond the screen"
    expect(page.get_by_label("Frames", exact=True)).to_be_hidden()
    expect(page.get_by_label("Images", exact=True)).to_be_visible()
    page.get_by_label("Prompt", exact=True).focus()
    seen = []
    for _ in range(20):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.name || document.activeElement.id"))
        if seen[-1] == "generate":
            break
    assert {"negative_prompt", "width", "num_inference_steps", "seed"} <= set(seen)
    page.keyboard.press("Enter")
    expect(page.locator("article").first.locator(".error, img")).not_to_have_count(0)
    shot(page, "4-phone")


def test_key(http_server: Server, page: Page) -> None:
    page.goto(http_server.url)
    expect(page.locator("#state")).to_have_text("This server needs an API key.")
    shot(page, "5-key")
    page.get_by_label("API key").fill("open sesame…")
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_text("The API key is wrong.")
    page.get_by_label("API key").fill("open sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_text("org/tiny-wan is ready")
    policy = http_server.http.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.timeout(400)
def test_a_restart_under_a_clip(bundled_server: Server, page: Page) -> None:
    """The page waits for the server and shows the clip that the next one makes."""
    page.goto(bundled_server.url)
    expect(page.locator("#state")).to_have_text("shapes is ready")
    page.get_by_label("Clip", exact=True).check()
    generate(page, "a red circle moving up", Width=64, Height=64, Steps=160, Frames=5)
    card = page.locator("article").first
    expect(card.locator(".told")).to_have_text(re.compile(r"^[1-9]\d? %"))
    bundled_server.process.kill()
    expect(card.locator(".told")).to_have_text("waiting for the server")
    expect(page.locator("#state")).to_have_text("The server cannot be reached.")
    shot(page, "3-waiting")
    arguments = ("--data-path", str(bundled_server.root / "data"), "--port", bundled_server.url.rpartition(":")[2])
    with serving(bundled_server.root, *arguments):
        expect(card.locator("video")).to_be_visible()
        expect(page.locator("#state")).to_have_text("shapes is ready")
        assert page.get_by_label("Steps", exact=True).input_value() == "160", "what was typed stays"
        shot(page, "6-after")
