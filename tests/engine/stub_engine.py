"""Poses as an interpreter that has an engine: ``stub_engine.py -m MODULE ...`` serves, or fails as
the target's name says; ``-c CODE`` answers what preflight asks. Writes its process ids first."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

if sys.argv[1] == "-c":
    print("version 9.9")
    sys.exit(0)

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

flags = dict(zip(sys.argv, sys.argv[1:], strict=False))
sglang = "sglang" in sys.argv[2]
target = Path(flags["--model-path"] if sglang else sys.argv[4])
name = target.name


def say(text):
    print(text, flush=True)


def shards(pause_s):
    for done in range(5):
        say(f"Loading safetensors checkpoint shards:  {25 * done}% Completed | {done}/4 "
            f"[00:0{done}<00:0{4 - done},  1.00it/s]")  # fmt: skip
        time.sleep(pause_s)


def fail(text, code=1):
    print(text, file=sys.stderr, flush=True)
    sys.exit(code)


if name == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
# An engine's workers are processes of their own.
helper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
target.with_name("pids").write_text(f"{os.getpid()} {helper.pid}")

if name == "dies-importing":
    fail("ImportError: libcudart.so.13: cannot open shared object file")
if name == "kernel":
    fail("ImportError: _C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEa")
say("Initializing a V1 LLM engine (v9.9)" if not sglang else "[t TP0] Init parallel begin.")
if name == "collective":
    fail("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94")
if name == "silent":
    time.sleep(1000)
say("Starting to load model /x..." if not sglang else "[t TP0] Load weight begin. avail mem=1 GB")
if name == "checkpoint":
    fail("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge")
if name == "dies-loading":
    fail("something of its own", 3)
if name == "slow":
    shards(0.7)
if name == "busy":  # says nothing, works
    end = time.monotonic() + 3
    while time.monotonic() < end:
        pass
if name == "garbage":
    os.write(1, b"\xff\xfe\x00 100%|\xe2\x96\x88 9/0 [??<:, \x1b[31m]\r" * 50 + b"\xf0\x9f")
say("Loading weights took 0.9 seconds")
if name == "oom":
    fail("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")
say("GPU KV cache size: 23,296 tokens")
eager = "--enforce-eager" in sys.argv or "--disable-decode-cuda-graph" in sys.argv
if not eager:
    say("Capturing CUDA graphs (decode, FULL):  50%|#####     | 3/6 [00:01<00:01,  2.9it/s]")
if name == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if name == "dies-capturing" and not eager:
    fail("RuntimeError: operation not permitted when stream is capturing")
if name == "hangs-capturing" and not eager:
    time.sleep(1000)
if name == "port":
    fail("OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): "
         "address already in use")  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    asked = 0

    def log_message(self, *_):
        pass

    def answer(self, status, body=b""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):  # 503 once: a port that is open is not yet an engine that is ready
        Handler.asked += 1
        self.answer(200 if Handler.asked > 1 else 503)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        key = os.environ.get("VLLM_API_KEY") or flags.get("--api-key")
        if key and self.headers["Authorization"] != f"Bearer {key}":
            self.answer(401, b"no key")
        elif name == "mute":
            time.sleep(1000)
        else:
            self.answer(200, b'{"usage": {"completion_tokens": 4}}')


server = ThreadingHTTPServer((flags["--host"], int(flags["--port"])), Handler)
say("Application startup complete." if not sglang else "The server is fired up and ready to roll!")
server.serve_forever()
