"""Small traces in the shape of torch's profiler (2.13: keys, categories, order), times in us.

``cpu``: two requests of vLLM on a CPU with a drafter; ``cuda``: vLLM's or SGLang's shape on a GPU,
kernels on streams, launches found by their correlation.
"""

import gzip
import json

BASE = 5_191_030_484_000.0  # torch's times are since a boot: a sum of large numbers


def event(cat, name, start, end, tid=7, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": BASE + start,
            "dur": end - start, "args": args}  # fmt: skip


def op(name, start, end, **more):
    return event("cpu_op", name, start, end, **more)


def scope(name, start, end, **more):
    return event("user_annotation", name, start, end, **more)


def write_trace(path, events):
    told = {
        "schemaVersion": 1, "deviceProperties": [], "displayTimeUnit": "ms",
        "traceEvents": [
            {"ph": "M", "name": "process_name", "ts": BASE, "pid": 1, "tid": 0,
             "args": {"name": "python"}},
            *events,
            {"ph": "i", "name": "Record Window End", "ts": BASE, "pid": "", "tid": "", "s": "g"},
        ],
        "traceName": "x.json",
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(told, indent=2).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def cpu_round(at):
    """One round of 1000 us::

    0 -400  execute_context_0(0)_generation_1(4)
       10-390   forward: linear 20-120 (addmm 30-110 in it), attention 120-220 (softmax in it),
                rms_norm 220-260, an unknown operator 300-320
    400-500 sample: argmax 420-480
    500-800 draft: mm 510-610, argmax 650-700
    800-1000 nothing
    """
    events = [
        scope("execute_context_0(0)_generation_1(4)", 0, 400),
        scope("gpu_model_runner: forward", 10, 390),
        op("aten::linear", 20, 120), op("aten::t", 20, 25), op("aten::addmm", 30, 110),
        op("vllm::unified_attention_with_output", 120, 220), op("aten::softmax", 150, 180),
        op("_C::rms_norm", 220, 260), op("mystery::thing", 300, 320),
        scope("gpu_model_runner: sample", 400, 500), op("aten::argmax", 420, 480),
        scope("gpu_model_runner: draft", 500, 800), op("aten::mm", 510, 610),
        op("aten::argmax", 650, 700),
    ]  # fmt: skip
    return [e | {"ts": e["ts"] + at} for e in events]


def cpu_prefill(at):
    return [
        scope("execute_context_1(9)_generation_0(0)", at, at + 400),
        op("aten::linear", at + 10, at + 390),
        scope("gpu_model_runner: draft", at + 400, at + 500), op("aten::mm", at + 410, at + 490),
    ]  # fmt: skip


def cpu_events(rounds=3, requests=2):
    """Each request: a prompt of 500 us, rounds of 1000 us; 5000 us between requests, and an
    operator of another thread that belongs to no step."""
    events = []
    for request in range(requests):
        first = request * (500 + 1000 * rounds + 5000)
        events += cpu_prefill(first)
        for i in range(rounds):
            events += cpu_round(first + 500 + 1000 * i)
    return [*events, op("aten::mm", 0, 9000, tid=8)]


def kernel(name, start, end, correlation, stream=7, cat="kernel"):
    return event(cat, name, start, end, tid=stream, stream=stream, correlation=correlation)


def launch(correlation, at, name="cudaLaunchKernel"):
    return event("cuda_runtime", name, at, at + 2, correlation=correlation)


def cuda_round(at, number, *, mark, drafted, sampled):
    """One round of 1000 us on the device, which runs 300 us behind the host::

    host    0-300: launches in the scopes ``sampled`` and ``drafted``, a graph in the mark
    device  300-500 gemm; 450-600 all-reduce on another stream (100 hidden behind ... 50 us
            behind the gemm); 600-700 flash attention; 700-720 argmax, launched in ``sampled``;
            750-950 gemm of the drafter, launched in ``drafted``; 950-960 copy
    """
    c = 100 * number
    events = [
        scope(mark, 0, 100), launch(c + 1, 10, "cudaGraphLaunch"),
        scope(sampled, 100, 150), op("aten::argmax", 110, 140), launch(c + 2, 120),
        drafted, launch(c + 3, 210), launch(c + 4, 290, "cudaMemcpyAsync"),
        event("gpu_user_annotation", mark, 300, 700, stream=7),
        kernel("nvjet_tst_128x64_h_bz_TNT", 300, 500, c + 1),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 450, 600, c + 1, stream=20),
        kernel("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", 600, 700, c + 1),
        kernel("void at::native::reduce_kernel<512, 1, ArgMaxOps>", 700, 720, c + 2),
        kernel("nvjet_tst_64x8_h_bz_TNT", 750, 950, c + 3),
        kernel("Memcpy DtoH (Device -> Pinned)", 950, 960, c + 4, cat="gpu_memcpy"),
    ]  # fmt: skip
    return [e | {"ts": e["ts"] + at} for e in events]


def vllm_cuda(rounds=4):
    """vLLM's model runner V2: no scopes, the drafter is told by Python's calls."""
    call = "vllm/v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py(165): propose"
    sample = "vllm/v1/worker/gpu/sample/sampler.py(60): __call__"
    out = []
    for i in range(rounds):
        drafted = event("python_function", call, 200, 280)
        out += cuda_round(1000 * i, i + 1, mark="execute_context_0(0)_generation_2(8)",
                          drafted=drafted, sampled=sample)  # fmt: skip
    # Which category a call has does not matter to what it launches.
    return [e | {"cat": "python_function"} if e["name"] == sample else e for e in out]


def sglang_cuda(rounds=4):
    """SGLang: a scope of the drafter, in which its own forward has a mark; two marks a stream."""
    out = []
    for i in range(rounds):
        out += cuda_round(1000 * i, i + 1, mark="step[TARGET_VERIFY bs=2]",
                          drafted=scope("draft", 200, 280), sampled="sample")  # fmt: skip
        at = 1000 * i
        out += [
            scope("step[DECODE bs=2]", at + 205, at + 270),
            event("gpu_user_annotation", "draft", at + 750, at + 950, stream=7),
            event("gpu_user_annotation", "step[DECODE bs=2]", at + 755, at + 940, stream=7),
            event("gpu_user_annotation", "step[TARGET_VERIFY bs=2]", at + 450, at + 600, tid=20),
        ]
    return out
