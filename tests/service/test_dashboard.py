"""The data behind the page over plain HTTP: figures, inspection, who may ask and change."""

import asyncio
import base64
import re
import socket
import threading
import time

import httpx
import pytest

from prefixcache.errors import ConfigurationError, NotFound
from prefixcache_service import Branch
from prefixcache_service.api import Access
from prefixcache_service.history import Shared
from prefixcache_service.ports import listen
from prefixcache_service.server import Server, ServerConfig
from tests.service.conftest import RunningServer

PROMPT = list(range(10, 40))  # 7 full blocks and 2 tokens
GREEDY = {"temperature": 0.0, "ignore_eos": True}
CHANGE = {"x-prefixcache": "test"}
SHARERS, CACHED, LEASED, PINNED = 0x1F, 0x20, 0x40, 0x80


class DashboardServer(RunningServer):
    """A server whose page has an access of its own."""

    def __init__(self, config, access, grace=2.0):
        self.access = access
        super().__init__(config, grace)

    async def _make(self, config):
        config = ServerConfig(port=0, http_port=0, grace=config.grace, access=self.access)
        server = Server(config)
        await server.open()
        return server


class Web(httpx.Client):
    """A client of one server's page."""

    def __init__(self, running):
        base = f"http://127.0.0.1:{running.server.http_port}"
        super().__init__(base_url=base, headers=CHANGE, verify=False)  # no certificates to load
        self.running = running


@pytest.fixture
def web(server):
    with Web(server) as web:
        yield web
        for pin in snapshot(web)["pins"]:
            web.post(f"/api/pins/{pin['pin_id']}/unpin", json={})


def snapshot(web):
    """What the page shows from now on, not what it may still keep of the last second."""
    web.running.server._dashboard._look.forget()
    answer = web.get("/api/snapshot")
    assert answer.status_code == 200, answer.text
    return answer.json()


def states(view):
    return list(base64.b64decode(view["blocks"]))


def find(view, blocks):
    """The only node of so many blocks."""
    (node,) = [node for node in view["nodes"] if node["blocks"] == blocks]
    return node


# ---------------------------------------------------------------- what is shown


def test_the_snapshot_shows_the_figures_of_get_cache_stats(web, client):
    client.generate(PROMPT, max_tokens=3, **GREEDY)
    client.generate(PROMPT, max_tokens=3, **GREEDY)
    shown, stats = snapshot(web)["stats"], client.stats()
    for name in ("prompt_tokens", "cached_tokens", "blocks_evictable", "blocks_total", "same_bits"):
        assert shown[name] == getattr(stats, name), name
    assert shown["hit_rate"] == pytest.approx(stats.hit_rate)
    assert shown["misses"] == dict(stats.misses)


def test_the_map_tells_free_cached_leased_pinned_and_shared_blocks(web, client):
    before = states(snapshot(web))
    assert set(before) == {0}
    kept = client.generate(PROMPT, max_tokens=1, keep_seconds=60, **GREEDY)
    view = states(snapshot(web))
    assert view.count(CACHED | LEASED) == 8
    assert view.count(0) == 512 - 8
    client.release(kept.sequence_id)
    client.pin(PROMPT, seconds=60)
    view = states(snapshot(web))
    assert (view.count(CACHED | PINNED), view.count(0)) == (7, 505)
    with client.stream(PROMPT, n=3, max_tokens=400, seed=1, ignore_eos=True) as stream:
        while sum(1 for state in view if state & SHARERS == 1) < 3:  # each soon has its own
            next(stream)
            view = states(snapshot(web))
        assert view.count(CACHED | PINNED | 3) == 7
        stream.cancel()


def test_the_tree_tells_uses_sharers_and_what_branches_off(web, client):
    client.generate(PROMPT, max_tokens=1, **GREEDY)
    for end in (100, 101, 102):
        client.generate([*PROMPT[:16], *[end] * 8], max_tokens=1, **GREEDY)
    nodes = snapshot(web)["nodes"]
    root, trunk = nodes[0], nodes[1]
    assert (root["blocks"], root["children"], root["parent"]) == (0, 1, -1)
    assert (trunk["start"], trunk["blocks"], trunk["children"], trunk["uses"]) == (0, 4, 4, 3)
    below = [node for node in nodes if node["parent"] == 1]
    assert sorted((node["start"], node["blocks"], node["uses"]) for node in below) == [
        (4, 2, 0),
        (4, 2, 0),
        (4, 2, 0),
        (4, 3, 0),
    ]
    assert all(node["sharers"] == 0 and node["text"] is None for node in nodes)


def test_a_node_tells_who_shares_it(web, client):
    kept = client.generate(PROMPT, max_tokens=1, keep_seconds=60, **GREEDY)
    branches = [Branch(kept.sequence_id), Branch(kept.sequence_id, text="x")]
    with client.stream_fork(branches, max_tokens=400, **GREEDY) as stream:
        next(stream)
        view = snapshot(web)
        detail = web.get(f"/api/nodes/{view['nodes'][1]['id']}").json()
        live = [one["id"] for one in view["sequences"] if one["state"] == "running"]
        assert (detail["num_live"], sorted(detail["live"])) == (2, sorted(live))
        assert detail["kept"] == [kept.sequence_id]
        assert {one["parent"] for one in view["sequences"] if one["id"] in live} == {
            kept.sequence_id
        }
        stream.cancel()


def test_beams_are_shown_as_hypotheses_of_their_search(web, client):
    search = threading.Thread(
        target=client.beam, args=(PROMPT,), kwargs={"num_beams": 3, "max_tokens": 300}
    )
    search.start()
    beams = []
    while search.is_alive() and len(beams) < 3:
        view = snapshot(web)
        beams = [one for one in view["sequences"] if one["hypothesis"]]
    search.join()
    assert len(beams) == 3
    assert len({one["request"] for one in beams}) == 1


@pytest.mark.slow
def test_the_history_is_kept_without_anybody_looking(web):
    time.sleep(2.2)
    history = web.get("/api/history").json()
    assert history["columns"][:2] == ["time", "cached_tokens"]
    assert len(history["rows"]) >= 2
    assert all(len(row) == len(history["columns"]) for row in history["rows"])


def test_browsers_share_a_look(running):
    calls = []

    async def fetch():
        calls.append(1)
        return len(calls)

    async def ask():
        shared = Shared(fetch, 60)
        first = await asyncio.gather(*(shared.get() for _ in range(5)))
        shared.forget()
        return first, await shared.get()

    assert running.call(ask()) == ([1] * 5, 2)


# ---------------------------------------------------------------- what is changed


def test_a_node_can_be_pinned_and_unpinned_and_no_client_can_unpin_it(web, client):
    client.generate(PROMPT, max_tokens=1, **GREEDY)
    node = find(snapshot(web), 7)
    pin = web.post(f"/api/nodes/{node['id']}/pin", json={"seconds": 60}).json()
    assert (pin["num_blocks"], pin["num_tokens"]) == (7, 28)
    assert client.stats().blocks_pinned == 7
    view = snapshot(web)
    assert [(p["pin_id"], p["node"]) for p in view["pins"]] == [(pin["pin_id"], node["id"])]
    assert find(view, 7)["pinned"]
    with pytest.raises(NotFound):
        client.unpin(pin["pin_id"])
    assert web.post(f"/api/pins/{pin['pin_id']}/unpin", json={}).json()["num_blocks"] == 7
    assert client.stats().blocks_pinned == 0


def test_flushing_a_node_leaves_the_rest(web, client):
    client.generate(PROMPT, max_tokens=1, **GREEDY)
    client.generate([*PROMPT[:16], *[100] * 8], max_tokens=1, **GREEDY)
    node = find(snapshot(web), 3)
    assert web.post(f"/api/nodes/{node['id']}/flush", json={}).json() == {"blocks_freed": 3}
    assert client.stats().blocks_evictable == 6
    gone = web.post(f"/api/nodes/{node['id']}/flush", json={})
    assert gone.status_code == 404
    assert "no longer cached" in gone.json()["error"]
    assert web.post("/api/flush", json={}).json() == {"blocks_freed": 6}


def test_a_split_run_is_still_found_under_its_old_name(web, client):
    client.generate(PROMPT, max_tokens=1, **GREEDY)
    node = find(snapshot(web), 7)
    client.generate([*PROMPT[:16], *[100] * 8], max_tokens=1, **GREEDY)
    detail = web.get(f"/api/nodes/{node['id']}").json()
    assert (detail["node"]["start"], detail["node"]["blocks"]) == (4, 3)


def test_sequences_of_any_salt_can_be_released(server, web):
    with server.client(cache_salt="other") as other:
        kept = other.generate(PROMPT, max_tokens=1, keep_seconds=60, **GREEDY)
        receipt = web.post(f"/api/sequences/{kept.sequence_id}/release", json={"subtree": True})
        assert receipt.json()["sequence_ids"] == [kept.sequence_id]
        assert other.sequences() == ()


@pytest.mark.parametrize(
    ("path", "body", "code", "sentence"),
    [
        ("/api/nodes/zz/pin", b"{}", 404, "hexadecimal"),
        ("/api/nodes/00/pin", b'{"seconds": 60}', 404, "no longer cached"),
        ("/api/nodes/00/pin", b'{"seconds": -1}', 400, "seconds: must be above 0"),
        ("/api/nodes/00/pin", b'{"seconds": NaN}', 400, "seconds: must be above 0"),
        ("/api/nodes/00/pin", b'{"seconds": "1"}', 400, "seconds: must be a number"),
        ("/api/nodes/00/pin", b'{"seconds": 1%s}' % (b"0" * 400), 400, "beyond all bounds"),
        ("/api/nodes/00/pin", b"[]", 400, "JSON object"),
        ("/api/nodes/00/pin", b"[" * 4000, 400, "nested too deeply"),
        ("/api/nodes/00/pin", b"{", 400, "not JSON"),
        ("/api/nodes/00/pin", b" " * 5000, 413, "at most 4096 bytes"),
        ("/api/pins/00/unpin", b"{}", 404, "not known"),
        ("/api/sequences/00/release", b"{}", 404, "not known"),
        ("/api/sequences/00/release", b'{"subtree": 1}', 400, "true or false"),
        ("/api/none", b"{}", 404, "nothing is at this address"),
        ("/api/snapshot", b"{}", 405, "does not take this method"),
    ],
)
def test_refusals_are_json_with_a_sentence(web, path, body, code, sentence):
    answer = web.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == code
    assert sentence in answer.json()["error"]


# ---------------------------------------------------------------- who may ask


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"x-prefixcache": None}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"host": "evil.example"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_other_sites_cannot_change_anything(web, headers, code):
    base = {"content-type": "application/json", **CHANGE, **headers}
    with httpx.Client(base_url=web.base_url, verify=False) as bare:
        sent = {name: value for name, value in base.items() if value is not None}
        answer = bare.post("/api/flush", content=b"{}", headers=sent)
    assert answer.status_code == code
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/", "/api/snapshot", "/api/history", "/dashboard/app.js"])
def test_a_foreign_name_in_host_is_refused(web, path):
    answer = web.get(path, headers={"host": "evil.example:50052"})
    assert answer.status_code == 403
    assert "--http-allowed-host" in answer.json()["error"]
    for host in ("localhost:1", "127.0.0.1", "[::1]:50052", "10.1.2.3"):
        assert web.get(path, headers={"host": host}).status_code == 200
    assert web.get("/metrics", headers={"host": "prometheus.example"}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/api/snapshot", "/metrics", "/api/none"])
def test_every_answer_has_the_headers_that_protect_it(web, path):
    headers = web.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


def test_the_page_has_no_inline_script_and_needs_no_other_host(web):
    page = web.get("/").text
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|style=", page)
    for name in re.findall(r'(?:src|href)="(/dashboard/[^"]+)"', page):
        asset = web.get(name)
        assert asset.status_code == 200
        assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg", "", asset.text)


# ---------------------------------------------------------------- prompts, names, bad moments


def test_prompts_are_text_only_where_that_was_asked_for(tiny_config):
    running = DashboardServer(tiny_config, Access(show_prompts=True, hosts=("cache.example",)))
    try:
        running.load()
        with running.client() as client, Web(running) as web:
            client.generate("The quick brown fox jumps over the lazy dog", max_tokens=1)
            view = snapshot(web)
            assert view["nodes"][1]["text"].startswith("The quick brown fox")
            detail = web.get(f"/api/nodes/{view['nodes'][1]['id']}").json()
            assert detail["text"].startswith("The quick brown fox")
            assert web.get("/", headers={"host": "cache.example"}).status_code == 200
    finally:
        running.close()


def test_prompts_are_absent_otherwise(server, web, client):
    client.generate("The quick brown fox jumps over the lazy dog", max_tokens=1)
    view = snapshot(web)
    detail = web.get(f"/api/nodes/{view['nodes'][1]['id']}")
    assert detail.json()["text"] is None
    assert "quick" not in web.get("/api/snapshot").text + detail.text + web.get("/").text


def test_the_page_without_scripts_has_the_figures(web, client):
    client.generate(PROMPT, max_tokens=1, **GREEDY)
    client.generate(PROMPT, max_tokens=1, **GREEDY)
    stats, page = client.stats(), web.get("/").text
    plain = page.partition("<noscript>")[2].partition("</noscript>")[0]
    for figure in (
        f"{stats.hit_rate:.1%}",
        f"{stats.computed_tokens:,}",
        f"{stats.blocks_evictable:,} blocks",
        f"{stats.misses['never_seen']:,} tokens",
        'href="/metrics"',
    ):
        assert figure in plain, figure


def test_a_scrape_and_the_page_are_answered_while_loading_and_draining(tiny_config):
    running = DashboardServer(tiny_config, Access(), grace=30.0)
    with Web(running) as web:
        page = web.get("/")
        assert page.status_code == 200
        assert "still loading" in page.text
        refusal = web.get("/api/snapshot")
        assert refusal.status_code == 503
        assert refusal.json() == {"error": "the model is still loading"}
        running.load()
        with running.client() as client, client.stream(PROMPT, max_tokens=450, **GREEDY) as stream:
            next(stream)
            drain = asyncio.run_coroutine_threadsafe(running.server.drain(), running.loop)
            time.sleep(0.1)
            paths = ("/", "/metrics", "/healthz", "/api/snapshot")
            codes = {path: web.get(path).status_code for path in paths}
            stream.result()
            drain.result(10)
    assert codes == {"/": 200, "/metrics": 200, "/healthz": 503, "/api/snapshot": 200}
    running.end()


def test_a_taken_port_says_which_flag_to_change_and_to_what():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError) as error:
            listen("127.0.0.1", port, "--http-host", "--http-port")
    assert f"127.0.0.1:{port}" in str(error.value)
    assert "choose another with --http-port (0 takes any free one)" in str(error.value)
    with pytest.raises(ConfigurationError, match="address of this machine to --http-host"):
        listen("192.0.2.1", 0, "--http-host", "--http-port")
