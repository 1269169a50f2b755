"""A server that streams as vLLM or SGLang do, counts what it served, and tells it in /metrics."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeEngine:
    """``rounds``: accepted drafts of each round of every answer; none: no drafter. Its answers are
    tokens 100, 101, ... ``events`` replaces the stream; ``metrics`` what /metrics says."""

    def __init__(self, rounds=(), *, kind="vllm", incremental=False, events=None, metrics=None):
        self.rounds, self.kind, self.incremental = list(rounds), kind, incremental
        self.events, self.metrics = events, metrics
        self.requests, self.lock = [], threading.Lock()
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.fake, self._http.daemon_threads = self, True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def close(self):
        self._http.shutdown()
        self._http.server_close()

    def chunks(self, limit):
        """Token ids of each chunk: the prefill's, then a round at a time, up to ``limit``."""
        sizes = [1, *(a + 1 for a in self.rounds)] if self.rounds else [1] * limit
        ids, out = list(range(100, 100 + limit)), []
        for size in sizes:
            if ids:
                out.append(ids[:size])
                ids = ids[size:]
        return out

    def stream(self, request):
        if self.events is not None:
            return self.events
        return self._vllm(request) if self.kind == "vllm" else self._sglang(request)

    def _vllm(self, request):
        chunks = self.chunks(request["max_completion_tokens"])
        yield {"prompt_token_ids": [1, 2], "choices": [{"delta": {"role": "assistant"}}]}
        for i, ids in enumerate(chunks):
            finish = "length" if i == len(chunks) - 1 else None
            yield {"choices": [{"delta": {"content": "x"}, "token_ids": ids,
                                "finish_reason": finish}]}  # fmt: skip
        told = {"usage": {"completion_tokens": sum(map(len, chunks))}, "choices": []}
        if self.rounds:
            rounds = self.rounds[: len(chunks) - 1]
            histogram = [rounds.count(a) for a in range(4)]
            told["metrics"] = {"speculative_decoding": {
                "acceptance_histogram": histogram, "num_spec_steps": len(rounds),
                "num_accepted_draft_tokens": sum(rounds), "num_draft_tokens": 3 * len(rounds),
                "per_step_accepted": rounds, "per_step_drafted": [3] * len(rounds),
            }}  # fmt: skip
        yield told

    def _sglang(self, request):
        chunks = self.chunks(request["sampling_params"]["max_new_tokens"])
        so_far = []
        for i, ids in enumerate(chunks):
            so_far += ids
            meta = {"completion_tokens": len(so_far), "finish_reason": None}
            if i == len(chunks) - 1:
                meta["finish_reason"] = {"type": "length"}
                if self.rounds:
                    meta |= {"spec_verify_ct": len(chunks) - 1,
                             "spec_accept_token_num": sum(self.rounds[: len(chunks) - 1]),
                             "spec_draft_token_num": 3 * (len(chunks) - 1)}  # fmt: skip
            shown = list(ids) if self.incremental else list(so_far)
            yield {"text": "x", "output_ids": shown, "meta_info": meta}


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections that wait: its own 5 refuse a load of 32


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        fake = self.server.fake
        told = fake.metrics
        text = told() if callable(told) else told
        self.send_response(200 if text is not None else 404)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def do_POST(self):
        fake = self.server.fake
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.lock:
            fake.requests.append(request)
        self.send_response(200)
        if not request.get("stream"):
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(whole(list(fake.stream(request)))).encode())
            return
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in fake.stream(request):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


def whole(events):
    """vLLM's stream as the reply that it sends when no stream is asked for."""
    choices = [c for e in events for c in e.get("choices") or []]
    message = {
        "role": "assistant",
        "content": "".join(c["delta"].get("content", "") for c in choices),
    }
    choice = {"index": 0, "message": message, "finish_reason": choices[-1]["finish_reason"],
              "token_ids": [i for c in choices for i in c.get("token_ids", [])]}  # fmt: skip
    completion = events[-1]["usage"]["completion_tokens"]
    usage = {"prompt_tokens": 2, "completion_tokens": completion, "total_tokens": 2 + completion}
    head = {"id": "1", "object": "chat.completion", "created": 0, "model": "target"}
    told = {"prompt_token_ids": [1, 2], "metrics": events[-1].get("metrics")}
    return head | {"choices": [choice], "usage": usage} | told
