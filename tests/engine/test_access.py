"""A server behind a key: every way of asking sends it, and says what to do where it is refused."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from eagle3lib.cli import app
from eagle3lib.engine.access import API_KEY, open_url
from eagle3lib.engine.client import Asked, Client
from eagle3lib.engine.health import canary, counters
from eagle3lib.engine.pool import Pool
from eagle3lib.engine.stream import stream_chat
from eagle3lib.lab.errors import UserError
from eagle3lib.measure.live import read_metrics

KEY = "s3cret"
METRICS = "vllm:spec_decode_num_drafts_total 3\nvllm:generation_tokens_total 9\n"
REPLY = {
    "prompt_token_ids": [1],
    "choices": [{"message": {"role": "assistant", "content": "x"}, "token_ids": [2],
                 "finish_reason": "stop", "index": 0}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    "id": "1", "object": "chat.completion", "created": 1, "model": "target",
}  # fmt: skip
STREAM = [
    {"prompt_token_ids": [1], "choices": [{"delta": {"role": "assistant"}}]},
    {"choices": [{"delta": {"content": "x"}, "token_ids": [2], "finish_reason": "stop"}]},
    {"usage": {"completion_tokens": 1}, "choices": []},
]


class Handler(BaseHTTPRequestHandler):
    status = 401

    def log_message(self, *_):
        pass

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        if status == 302:
            self.send_header("Location", self.path.removeprefix("/to/"))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.server.keys.append(self.headers["Authorization"])
        if self.path.startswith("/to/"):
            return self.answer(302, "")
        pages = {"/metrics": METRICS, "/v1/models": json.dumps({"data": [{"id": "target"}]})}
        if self.path in pages and not self.open():
            return self.answer(self.server.status, f"{self.headers['Authorization']} is wrong")
        return self.answer(200 if self.path in pages else 404, pages.get(self.path, ""))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.open():
            return self.answer(self.server.status, f"{self.headers['Authorization']} is wrong")
        if asked.get("stream"):
            return self.answer(200, "".join(f"data: {json.dumps(e)}\n\n" for e in STREAM))
        return self.answer(200, json.dumps(REPLY))

    def open(self):
        return self.headers["Authorization"] == f"Bearer {KEY}"


@pytest.fixture(params=[401, 403])
def server(request):
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.status, http.keys = request.param, []
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    http.url = f"http://127.0.0.1:{http.server_port}"
    yield http
    http.shutdown()
    http.server_close()


def pooled(url):
    """A key that was taken back after the pool had looked."""
    pool = Pool([Client(url)])
    pool._model = pool._servers[0].model = "target"
    return pool.chat([], max_tokens=4, temperature=0.0)


ASKED = Asked([], (), "default")
WAYS = {
    "model": lambda url: Client(url).model(),
    "check": lambda url: Pool([Client(url)]).check(),
    "pool": pooled,
    "counters": lambda url: Client(url).speculation_counters()["drafts"],
    "metrics": read_metrics,
    "stream": lambda url: stream_chat(url, ASKED, max_tokens=4, temperature=0.0, seed=None),
}
each_way = pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)


@each_way
def test_the_key_of_the_environment_opens_the_server(server, ask, monkeypatch):
    monkeypatch.setenv(API_KEY, f"{KEY}\n")
    assert ask(server.url)


@each_way
@pytest.mark.parametrize("key", ["", "wr0ng"])
def test_a_refused_key_is_told_without_being_shown(server, ask, key, monkeypatch):
    monkeypatch.setenv(API_KEY, key)
    with pytest.raises(UserError) as told:
        ask(server.url)
    text = str(told.value)
    assert API_KEY in text and f"HTTP {server.status}" in text
    assert ("no key was sent" in text) == (not key)
    assert "wr0ng" not in text


def test_health_knows_a_refused_key_from_a_mute_server(server, monkeypatch):
    monkeypatch.delenv(API_KEY, raising=False)
    assert f"HTTP {server.status}: no key was sent" in canary(server.url, "target")
    assert counters(server.url) is None
    assert canary(server.url, "target", KEY) == ""
    monkeypatch.setenv(API_KEY, KEY)
    assert counters(server.url) == {"tokens": 9, "running": 0}


def test_watch_follows_a_server_behind_a_key(server, monkeypatch):
    asked = ["watch", server.url, "--interval", "0.1", "--looks", "1"]
    monkeypatch.delenv(API_KEY, raising=False)
    assert API_KEY in str(CliRunner().invoke(app, asked).exception)
    monkeypatch.setenv(API_KEY, KEY)
    assert CliRunner().invoke(app, asked).exit_code == 0


def test_a_redirect_does_not_take_the_key_along(server, monkeypatch):
    monkeypatch.setenv(API_KEY, KEY)
    with pytest.raises(UserError):
        open_url(f"{server.url}/to/{server.url}/metrics", 5)
    assert server.keys == [f"Bearer {KEY}", None]


def test_a_key_that_no_header_can_hold_is_refused_before_it_is_sent(monkeypatch):
    monkeypatch.setenv(API_KEY, "schlüssel")
    with pytest.raises(UserError, match=API_KEY) as told:
        Client("http://127.0.0.1:1")
    assert "schl" not in str(told.value)
