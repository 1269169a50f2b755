"""A real HTTP server of chat completions whose every reply, and every fault, is the test's."""

import hashlib
import json
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from eagle3lib.data.prompts import Prompt, prompt_id


class StubServer:
    """``reply(request)`` gives a body, or the name of a fault; GET finds ``pages``, from path to
    body or status. ``kill`` closes the port and every connection, ``start`` opens the same port
    again."""

    def __init__(self, reply, *, model="target", version="0.32.0", pages=()):
        self.reply, self.model, self.version = reply, model, version
        self.pages = dict(pages)
        self.requests, self.paths = [], []
        self.replied = 0
        self.lock = threading.Lock()
        self.dead = True
        self.port = 0
        self.start()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self):
        self._http = _Http(("127.0.0.1", self.port), _Handler)
        self._http.stub = self
        self.port = self._http.server_port
        self.dead = False
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def kill(self):
        self.dead = True
        self._http.shutdown()
        self._http.server_close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """Broken connections are what the tests are about; http.server would print them."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept, as engines keep them
    disable_nagle_algorithm = True  # else each reply waits 40 ms for an acknowledgement

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/version" and self.server.stub.version:
            self.send(200, {"version": self.server.stub.version})
        elif self.path == "/v1/models":
            data = [{"id": self.server.stub.model, "object": "model"}]
            self.send(200, {"object": "list", "data": data})
        else:
            page = self.server.stub.pages.get(self.path, 404)
            self.send(page, {}) if isinstance(page, int) else self.send(200, page)

    def do_POST(self):
        stub = self.server.stub
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stub.lock:
            stub.requests.append(request)
            stub.paths.append(self.path)
        reply = stub.reply(request)
        if stub.dead:
            return self.reset()
        with stub.lock:
            stub.replied += isinstance(reply, dict)
        return self.send(200, reply) if isinstance(reply, dict) else self.fail(reply, request)

    def fail(self, fault, request):
        body = chat_body(request, [1, 2, 3], "hello")
        if fault.isdigit():
            self.send(int(fault), {"error": {"message": f"fault {fault}"}})
        elif fault == "reset":
            self.reset()
        elif fault == "half a body":
            self.send(200, body, share=0.5)
        elif fault == "slow":
            time.sleep(3)
            self.send(200, body)
        elif fault == "no JSON":
            self.send(200, json.dumps(body)[:-9])
        else:
            self.send(200, damaged(body, fault))

    def send(self, status, body, share=1.0):
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("retry-after-ms", "5")  # the client's own wait is half a second
        self.end_headers()
        self.wfile.write(content[: int(len(content) * share)])
        self.close_connection = share < 1 or self.server.stub.dead

    def reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


def damaged(body, fault):
    if fault == "no choice":
        return body | {"choices": []}
    choice = body["choices"][0]
    if fault == "no ids":
        return body | {"choices": [choice | {"token_ids": None}]}
    if fault == "wrong ids":
        return body | {"choices": [choice | {"token_ids": [1, "2", -3]}]}
    if fault == "lost ids":
        return body | {"choices": [choice | {"token_ids": choice["token_ids"][1:]}]}
    assert fault == "empty"
    return body | {"choices": [choice | {"token_ids": []}], "usage": None}


def chat_body(request, ids, text, finish_reason="stop", **message):
    prompt_ids = list(json.dumps(request.get("messages")).encode())
    return {
        "id": "1", "object": "chat.completion", "created": 0, "model": "target",
        "choices": [{"index": 0, "finish_reason": finish_reason, "token_ids": ids,
                     "message": {"role": "assistant", "content": text, **message}}],
        "prompt_token_ids": prompt_ids,
        "usage": {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids),
                  "total_tokens": len(prompt_ids) + len(ids)},
    }  # fmt: skip


def own_words(request):
    """Three to nine tokens, a function of what was asked and of the seed."""
    asked = json.dumps([request["messages"], request.get("seed")])
    digest = hashlib.sha256(asked.encode()).digest()
    return chat_body(
        request, list(digest[: 3 + digest[0] % 7]), f"said {digest.hex()[:8]} 🙂\u2028"
    )


def prompt_of(*texts, **more):
    """User, assistant, user, ... in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return Prompt(prompt_id(messages), tuple(messages), "workload", **more)
