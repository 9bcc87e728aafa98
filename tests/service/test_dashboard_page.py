"""The page in a real browser: Debian's Chromium through playwright; skipped where that is missing.

PREFIXCACHE_SCREENSHOTS=directory keeps pictures of the page to look at.
"""

import os
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from prefixcache.errors import NotFound
from prefixcache_service import Branch
from prefixcache_service.server import Server
from tests.service.conftest import RunningServer

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --disable-quic --no-first-run "
    "--host-resolver-rules=MAP\x20evil.example\x20127.0.0.1"
)
PROMPT = list(range(10, 40))  # 7 full blocks and 2 tokens
GREEDY = {"temperature": 0.0, "ignore_eos": True}
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

CONTRASTS = """() => {
  const channel = (c) => ((c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const numbers = (css) => css.match(/[\\d.]+/g).map(Number);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = numbers(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.closest(".hidden, .skip")) continue;
    const style = getComputedStyle(node);
    const ink = numbers(node.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [a, b] = [light(ink), light(ground(node))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), node.textContent.trim().slice(0, 40)]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=[f"--{flag}".strip() for flag in FLAGS.split(" --")]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, server):
    """Open the page with the settings of a browser context; fails on any error in its console.

    That a node is gone, which the page tells, is an answer 404, which the browser logs.
    """
    contexts, errors = [], []

    def open_page(path="/", **settings):
        context = browser.new_context(**{**DESKTOP, **settings})
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        server.server._dashboard._look.forget()  # the last test's
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.server.http_port}{path}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [error for error in errors if "status of 404" not in error] == []


@pytest.fixture
def filled(client):
    """Some prompts with a common beginning, forks of one of them, and no pin at the end."""
    for end in (100, 101):
        client.generate([*PROMPT[:16], *[end] * 8], max_tokens=1, **GREEDY)
    kept = client.generate(PROMPT, max_tokens=1, keep_seconds=60, **GREEDY)
    client.fork([Branch(kept.sequence_id)] * 2, max_tokens=4, keep_seconds=60, **GREEDY)
    yield client
    for info in client.sequences():
        client.release(info.sequence_id)


def picture(page, name):
    """The page as PNG, kept where that was asked for."""
    data = page.screenshot(full_page=True)
    where = os.environ.get("PREFIXCACHE_SCREENSHOTS")
    if where:
        Path(where, f"{name}.png").write_bytes(data)
    return data


def row(page, *, blocks):
    """The tree's row of a node of so many blocks."""
    return page.locator("[role=treeitem]").filter(
        has=page.locator(f"span:nth-child(5):text-is('{blocks}')")
    )


def test_the_figures_are_those_of_get_cache_stats(open_page, filled):
    page = open_page()
    expect(page.locator("#connection-text")).to_have_text("Live")
    expect(page.locator("[role=treeitem]").first).to_be_visible()
    stats = filled.stats()
    assert page.inner_text("#hit-rate") == f"{100 * stats.hit_rate:.1f} %"
    assert page.inner_text("#saved") == f"{stats.cached_tokens + stats.forked_tokens:,}"
    assert f"of {stats.blocks_total} blocks" in page.inner_text("#pool-sub")
    assert page.inner_text("#sequences-sub") == "0 waiting · 3 kept"
    missed = page.locator("#misses .name b").all_inner_texts()
    assert [text.split(" ")[0] for text in missed] == [
        f"{stats.misses[cause]:,}"
        for cause in ("never_seen", "evicted", "other_namespace", "bypassed", "remainder")
    ]
    legend = page.locator("#pool-legend b").all_inner_texts()
    assert sum(int(count) for count in legend) == stats.blocks_total
    assert int(legend[0]) == stats.blocks_free
    assert page.locator("#sequences tbody tr").count() == 3
    assert page.locator("#sequences tbody td:first-child").all_inner_texts()[1].startswith("└ ")
    picture(page, "figures")


def test_a_click_pins_unpins_and_flushes_a_prefix(open_page, filled):
    page = open_page()
    row(page, blocks=4).click()
    expect(page.locator("#detail")).to_contain_text("Kept for 3 sequences")
    page.click("#pin")
    expect(page.locator("#toast")).to_contain_text("Pinned 4 blocks")
    assert filled.stats().blocks_pinned == 4
    expect(row(page, blocks=4)).to_contain_text("pinned")
    page.get_by_role("button", name="Unpin").click()
    expect(page.locator("#toast")).to_contain_text("Unpinned 4 blocks")
    assert filled.stats().blocks_pinned == 0
    row(page, blocks=2).first.click()
    expect(page.locator("#detail")).to_contain_text("16 to 24")
    before = filled.stats().blocks_evictable
    page.click("#flush")
    page.click("#confirm button[value=cancel]")
    assert filled.stats().blocks_evictable == before
    page.click("#flush")
    page.click("#confirm-ok")
    expect(page.locator("#toast")).to_contain_text("Flushed 2 blocks")
    assert filled.stats().blocks_evictable == before - 2
    expect(page.locator("#detail")).to_contain_text("no longer cached")


@pytest.mark.slow
def test_a_sequence_can_be_released(open_page, filled):
    page = open_page()
    page.get_by_role("button", name="Release").first.click()
    page.click("#confirm-ok")
    expect(page.locator("#sequences tbody tr")).to_have_count(0)
    assert filled.sequences() == ()


def test_the_keyboard_alone_is_enough(open_page, filled):
    page = open_page()
    expect(page.locator("[role=treeitem]").first).to_be_visible()
    keys = page.keyboard
    keys.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    visited = []
    while page.evaluate("document.activeElement.getAttribute('role')") != "treeitem":
        keys.press("Tab")
        visited.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert len(visited) < 20, visited
    assert {"pause", "pool-map"} <= set(visited)
    keys.press("ArrowDown")
    keys.press("ArrowLeft")  # folds
    expect(page.locator("[role=treeitem]")).to_have_count(2)
    keys.press("ArrowRight")
    keys.press("Enter")
    expect(page.locator("#detail h3")).to_contain_text("depth 0")
    while page.evaluate("document.activeElement.id") != "pin":
        keys.press("Tab")
    time.sleep(1.2)  # a snapshot comes in between: the focus stays
    keys.press("Enter")
    expect(page.locator("#toast")).to_contain_text("Pinned 4 blocks")
    assert filled.stats().blocks_pinned == 4
    page.focus("#flush")
    keys.press("Enter")
    expect(page.locator("#confirm")).to_be_visible()
    keys.press("Escape")
    expect(page.locator("#confirm")).not_to_be_visible()
    page.get_by_role("button", name="Unpin").press("Enter")
    expect(page.locator("#toast")).to_contain_text("Unpinned")
    page.focus("#pool-map")
    keys.press("ArrowRight")
    keys.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("Block 1:")
    expect(page.locator("#said")).to_contain_text("Block 1:")


def test_a_phone_needs_no_sideways_scrolling(open_page, filled):
    page = open_page(**PHONE)
    expect(page.locator("[role=treeitem]").first).to_be_visible()
    row(page, blocks=4).click()
    expect(page.locator("#pin")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    picture(page, "phone")


def test_both_themes_are_readable_and_differ(open_page, filled):
    pictures = {}
    for theme in ("light", "dark"):
        page = open_page(color_scheme=theme)
        row(page, blocks=4).click()
        expect(page.locator("#pin")).to_be_visible()
        pictures[theme] = picture(page, theme)
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 60
        assert min(contrasts)[0] >= 4.5, (theme, min(contrasts))
    assert pictures["light"] != pictures["dark"]


def test_without_scripts_the_figures_are_there(open_page, filled):
    page = open_page(java_script_enabled=False)
    stats = filled.stats()
    assert page.locator("#main").is_hidden()
    text = page.inner_text("noscript")
    assert f"{stats.hit_rate:.1%}" in text
    assert f"{stats.computed_tokens:,}" in text
    assert page.locator("noscript a").get_attribute("href") == "/metrics"
    picture(page, "plain")


@pytest.mark.slow
def test_an_empty_cache_says_what_to_do(open_page, server, client):
    page = open_page()
    expect(page.locator("#tree")).to_contain_text("prefixcache generate")
    expect(page.locator("#sequences")).to_contain_text("No sequence runs")


def test_less_motion_is_respected(open_page):
    page = open_page(reduced_motion="reduce")
    moving = "[...document.querySelectorAll('*')].filter((e) => getComputedStyle(e)"
    assert page.evaluate(f"{moving}.transitionDuration !== '0s').length") == 0


def test_another_site_cannot_change_anything_or_read_the_page(browser, server, filled):
    """A page of another origin, and a name of theirs that points to us."""
    port = server.server.http_port
    before = filled.stats().blocks_evictable
    with browser.new_context() as context:
        page = context.new_page()
        answer = page.goto(f"http://evil.example:{port}/")
        assert answer.status == 403
        script = """async ([url, headers]) => {
          const tries = [{ mode: "no-cors" }, { headers }];
          const results = [];
          for (const more of tries) {
            const sent = fetch(url, { method: "POST", body: "{}", ...more });
            results.push(await sent.then((answer) => answer.type, () => "refused"));
          }
          return results;
        }"""
        url = f"http://127.0.0.1:{port}/api/flush"
        page.goto("about:blank")
        headers = {"content-type": "application/json", "x-prefixcache": "page"}
        assert page.evaluate(script, [url, headers])[1] == "refused"
    assert filled.stats().blocks_evictable == before


class ServerAt(RunningServer):
    """A server whose page is at a given port."""

    def __init__(self, http_port, config):
        self.http_port = http_port
        super().__init__(config, 0.1)

    async def _make(self, config):
        server = Server(replace(config, http_port=self.http_port))
        await server.open()
        return server


@pytest.mark.slow
def test_the_page_pauses_and_comes_back_after_a_restart(browser, tiny_config):
    running = RunningServer(tiny_config, grace=0.1).load()
    port = running.server.http_port
    with browser.new_context(**DESKTOP) as context:
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        state = page.locator("#connection-text")
        expect(state).to_have_text("Live")
        page.click("#pause")
        expect(state).to_have_text("Paused")
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        time.sleep(1.5)
        assert asked == []
        page.click("#pause")
        expect(state).to_have_text("Live")
        running.close()
        expect(state).to_have_text("Reconnecting", timeout=10_000)
        expect(page.locator("#notice")).to_contain_text("the server does not answer")
        running = ServerAt(port, tiny_config).load()
        expect(state).to_have_text("Live", timeout=15_000)
        expect(page.locator("#notice")).to_be_hidden()
    running.close()


@pytest.mark.slow
def test_it_stays_whole_under_load(open_page, server, client):
    """Forks and beams while the page looks on: no error, sharing is shown, books balance."""
    stop = threading.Event()

    def load(number):
        with server.client() as own:
            while not stop.is_set():
                prompt = [*PROMPT, *range(number, number + 9)]
                kept = own.generate(prompt, max_tokens=4, keep_seconds=5, **GREEDY)
                branches = [Branch(kept.sequence_id)] * 3
                own.fork(branches, max_tokens=60, seed=1, ignore_eos=True, keep_seconds=2)
                own.beam(prompt, num_beams=3, max_tokens=40)

    threads = [threading.Thread(target=load, args=(n,)) for n in (100, 140, 180)]
    for thread in threads:
        thread.start()
    try:
        page = open_page()
        shared = page.locator("#pool-legend span:nth-child(6) b")
        deadline = time.monotonic() + 30
        while shared.inner_text() in {"", "0"}:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(15)
        expect(page.locator("#connection-text")).to_have_text("Live")
        picture(page, "load")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    with suppress(NotFound):  # all have expired
        client.release(*[info.sequence_id for info in client.sequences()])
