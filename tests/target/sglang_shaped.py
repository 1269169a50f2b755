"""A tiny target run and hooked as SGLang 0.5.15 and 0.5.23 run and hook theirs; as a program, an
interpreter that poses as having SGLang, behind ``/generate`` in its shapes.

Read there: ``model_executor/hook_manager.py`` (how hooks are attached), ``models/llama.py`` and
``layers/layernorm.py`` (norms that add the residual in place), ``managers/scheduler.py`` (requests
of one forward end to end, their ids and lengths in the batch).
"""

import os
import sys

if __name__ == "__main__" and sys.argv[1] == "-c":
    print("version", os.environ.get("SHAPED_VERSION", "0.5.23"))
    sys.exit(0)

import fnmatch
import importlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import torch
from torch import nn
from transformers import AutoModelForCausalLM


class Norm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x, residual=None):
        if residual is None:
            return self._normed(x)
        residual.add_(x)  # in place, as its fused kernel does
        x.copy_(self._normed(residual))
        return x, residual

    def _normed(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Layer(nn.Module):
    def __init__(self, layer, rotary):
        super().__init__()
        self.input_layernorm = Norm(layer.input_layernorm)
        self.post_attention_layernorm = Norm(layer.post_attention_layernorm)
        self.self_attn, self.mlp, self.rotary = layer.self_attn, layer.mlp, (rotary,)

    def forward(self, positions, x, batch, residual):
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self._attention(positions, x, batch)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual

    def _attention(self, positions, x, batch):
        out = []
        parts = x.split(batch.extend_seq_lens_cpu), positions.split(batch.extend_seq_lens_cpu)
        for own, at in zip(*parts, strict=True):
            turned = self.rotary[0](own[None], at[None])
            out.append(self.self_attn(own[None], turned, attention_mask=None)[0][0])
        return torch.cat(out)


class LogitsProcessor(nn.Module):
    def forward(self, input_ids, states, lm_head, batch, aux_hidden_states=None):
        ends = torch.tensor(batch.extend_seq_lens_cpu).cumsum(0) - 1
        return lm_head(states[ends])


class Model(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.lm_head = nn.Module(), model.lm_head
        self.model.embed_tokens = model.model.embed_tokens
        layers = [Layer(layer, model.model.rotary_emb) for layer in model.model.layers]
        self.model.layers, self.model.norm = nn.ModuleList(layers), Norm(model.model.norm)
        self.logits_processor = LogitsProcessor()

    @torch.no_grad()
    def forward(self, batch):
        x, residual = self.model.embed_tokens(batch.input_ids), None
        for layer in self.model.layers:
            x, residual = layer(batch.positions, x, batch, residual)
        states, _ = self.model.norm(x, residual)
        # A wrapper of several media gives no ids here; the batch has them.
        return self.logits_processor(None, states, self.lm_head, batch)


def attach(model, specs):
    """As SGLang's ``register_forward_hooks`` does."""
    for spec in specs:
        module_name, function = spec["hook_factory"].split(":")
        hook = getattr(importlib.import_module(module_name), function)(spec["config"])
        for name, module in model.named_modules():
            if any(fnmatch.fnmatch(name, pattern) for pattern in spec["target_modules"]):
                module.register_forward_hook(hook)


def batch_of(requests, prefix_tokens=0):
    lengths = [len(r["input_ids"]) for r in requests]
    return SimpleNamespace(
        rids=[r["rid"] for r in requests],
        input_ids=torch.tensor([i for r in requests for i in r["input_ids"]]),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens_cpu=[prefix_tokens for _ in requests],
        forward_mode=SimpleNamespace(is_extend=lambda: True),
    )


def main():
    torch.set_num_threads(1)
    flags = dict(zip(sys.argv, sys.argv[1:], strict=False))
    loaded = AutoModelForCausalLM.from_pretrained(flags["--model-path"], dtype=torch.float32)
    model = Model(loaded.eval())
    one_forward = threading.Lock()
    attach(model, json.loads(flags["--forward-hooks"]))

    class Handler(BaseHTTPRequestHandler):
        def answer(self, told, code=200):
            data = json.dumps(told).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.answer({})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "input_ids" not in body:  # the canary
                one = {"message": {"role": "assistant", "content": "a"}, "text": "a"}
                self.answer({"choices": [one], "usage": {"completion_tokens": 1}})
                return
            # Another request, which the server asked itself, comes first in the same forward.
            own = {"rid": "HEALTH_CHECK_1", "input_ids": [3, 4, 5]}
            with one_forward:
                token = int(model(batch_of([own, body]))[1].argmax())
            finish = {"type": "length", "length": 1}
            self.answer({
                "text": "", "output_ids": [token],
                "meta_info": {
                    "id": body["rid"], "finish_reason": finish, "weight_version": "default",
                    "prompt_tokens": len(body["input_ids"]), "completion_tokens": 1,
                    "cached_tokens": 0, "e2e_latency": 0.1,
                },
            })  # fmt: skip

        def log_message(self, *_):
            pass

    ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()


if __name__ == "__main__":
    main()
