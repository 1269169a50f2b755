"""Where a start is, read from real logs; and what a failure's text is classified as."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.failures import (
    CACHE,
    CAPTURE,
    CHECKPOINT,
    COLLECTIVE,
    DIED,
    HANG,
    KERNEL,
    MEMORY,
    PORT,
    classify_death,
    classify_hang,
    remedies,
)
from eagle3lib.engine.startup import StartupLog

# vLLM 0.32 on a CPU, with compilation and a drafter; lines that say nothing of the start left out.
REAL = Path(__file__).with_name("logs") / "vllm-0.32-cpu.txt"
# Formats of SGLang 0.5.23's sources, filled in as public logs show them.
SGLANG = """\
[2026-11-10 19:58:10] server_args=ServerArgs(model_path='x', disable_cuda_graph=False)
[2026-11-10 19:58:20 TP0] Init parallel begin.
[2026-11-10 19:58:21 TP0] Load weight begin. avail mem=139.02 GB
Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<01:03,  1.10s/it]
[2026-11-10 19:58:30 TP0] Load weight end. elapsed=8.2 s, type=LlamaForCausalLM, avail mem=111.1 GB
[2026-11-10 19:58:31 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 8, KV size: 2.0 GB
[2026-11-10 19:58:31 TP0] Memory pool end. avail mem=14.61 GB
[2026-11-10 19:58:31 TP0] Capture target verify CUDA graph begin. backend=full, avail mem=11.97 GB
Capturing batches (bs=1 avail_mem=11.18 GB):  50%|█████     | 18/36 [00:10<00:10,  3.37it/s]
[2026-11-10 19:59:09 TP0] Capture target verify CUDA graph end. elapsed=11.39 s, mem usage=1.00 GB
[2026-11-10 19:59:10 TP0] Load weight begin. avail mem=11.02 GB
[2026-11-10 19:59:12] INFO:     Application startup complete.
[2026-11-10 19:59:12] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)
[2026-11-10 19:59:15] The server is fired up and ready to roll!
""".splitlines(keepends=True)
VLLM_GPU = """\
(EngineCore pid=1) INFO [core.py:133] Initializing a V1 LLM engine (v0.33.0) with config: model='x'
(Worker pid=1) INFO [gpu_model_runner.py:5040] Starting to load model x...
Loading safetensors checkpoint shards:  48% Completed | 31/64 [12:10<1:02:57, 23.5s/it]
(Worker pid=1) INFO [gpu_model_runner.py:5150] Model loading took 66.5 GiB memory and 1510.1 seconds
(Worker pid=1) INFO [backends.py:1167] Dynamo bytecode transform time: 6.13 s
(Worker pid=1) INFO [backends.py:399] Compiling a graph for compile range (1, 2048) takes 31.02 s
(EngineCore pid=1) INFO [kv_cache_utils.py:2328] GPU KV cache size: 23,296 tokens
Capturing CUDA graphs (decode, FULL):  43%|####2     | 3/7 [00:02<00:04,  1.12s/it]
(Worker pid=1) INFO [gpu_model_runner.py:6582] Graph capturing finished in 4 secs, took 0.12 GiB
(APIServer pid=1) INFO [launcher.py:186] Available routes are:
INFO:     Application startup complete.
""".splitlines(keepends=True)


def steps(lines, engine, tmp_path, name="log"):
    log, shown = tmp_path / name, []
    reader = StartupLog(log, engine)
    assert reader.poll().text() == "importing"
    with log.open("a", encoding="utf-8") as file:
        for line in lines:
            file.write(line)
            file.flush()
            text = reader.poll().text()
            shown += [text] if [text] != shown[-1:] else []
    return shown


def test_a_real_vllm_log_shows_every_phase_once_and_in_order(tmp_path):
    lines = REAL.read_text(encoding="utf-8").splitlines(keepends=True)
    phases = [re.sub(r" \d+/.*", "", text) for text in steps(lines, "vllm", tmp_path)]
    assert list(dict.fromkeys(phases)) == [
        "importing", "starting the engine", "loading weights", "weights loaded", "compiling",
        "sizing the cache", "warming up", "opening the port", "ready",
    ]  # fmt: skip


def test_a_gpu_log_of_vllm_shows_counts_and_the_time_left(tmp_path):
    assert steps(VLLM_GPU, "vllm", tmp_path) == [
        "starting the engine", "loading weights",
        "loading weights 31/64 (23.5s/it) about 3777 s left", "weights loaded", "compiling",
        "sizing the cache", "capturing graphs 3/7 (1.12s/it) about 4 s left", "warming up",
        "opening the port", "ready",
    ]  # fmt: skip


def test_sglangs_phases_end_with_its_own_word_and_do_not_go_back_for_the_drafter(tmp_path):
    """Uvicorn's "startup complete" comes before SGLang's own warm-up request."""
    assert steps(SGLANG, "sglang", tmp_path) == [
        "importing", "starting the engine", "loading weights",
        "loading weights 1/4 (1.10s/it) about 63 s left", "weights loaded", "sizing the cache",
        "capturing graphs", "capturing graphs 18/36 (3.37it/s) about 10 s left", "warming up",
        "opening the port", "ready",
    ]  # fmt: skip


def test_a_line_that_is_written_in_two_halves_is_read_whole(tmp_path):
    text = "".join(VLLM_GPU[:3]).replace("\n", "\r")
    whole = steps([text], "vllm", tmp_path, "whole")[-1]
    assert steps(list(text), "vllm", tmp_path, "halves")[-1] == whole
    assert "31/64" in whole


def test_waiting_is_no_news(tmp_path):
    """vLLM repeats this line every minute while its workers hang."""
    log = tmp_path / "log"
    log.write_text("Starting to load model\n")
    reader = StartupLog(log, "vllm")
    reader.poll()
    before = reader.news_bytes
    with log.open("a") as file:
        file.write("No available shared memory broadcast block found in 60 seconds.\n" * 3)
    reader.poll()
    assert reader.news_bytes == before
    with log.open("ab") as file:
        file.write(b"\xff\xfe anything else\n")
    reader.poll()
    assert reader.news_bytes > before


DEATHS = [
    ("OSError: [Errno 98] error while attempting to bind on address: address already in use", PORT),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", MEMORY),
    ("ValueError: Free memory on device (3/139 GiB) on startup is less than desired GPU memory "
     "utilization (0.9, 125 GiB)", MEMORY),
    ("ValueError: No available memory for the cache blocks. Try increasing", CACHE),
    ("ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-", CACHE),
    ("CUDA error: no kernel image is available for execution on the device", KERNEL),
    ("ImportError: vllm/_C.abi3.so: undefined symbol: _ZN3c10", KERNEL),
    ("CUDA error: an illegal instruction was encountered", KERNEL),
    ("ValueError: Model architectures ['Foo'] are not supported for now.", CHECKPOINT),
    ("SafetensorError: Error while deserializing header: InvalidHeaderDeserialization", CHECKPOINT),
    ("KeyError: 'layers.0.self_attn.q_proj.weight'", CHECKPOINT),
    ("RuntimeError: The size of tensor: size mismatch for fc.weight", CHECKPOINT),
    ("torch.distributed.DistBackendError: NCCL error in: Process", COLLECTIVE),
    ("RuntimeError: operation not permitted when stream is capturing", CAPTURE),
    ("RuntimeError: something nobody has seen", DIED),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind"), DEATHS, ids=lambda v: v[:40])
def test_the_text_of_a_death_gives_its_class(text, kind):
    log = REAL.read_text(encoding="utf-8")  # an innocent log before it must not decide
    assert classify_death(log + text, "loading weights", 1) == kind
    if kind not in (DIED, PORT):
        assert classify_hang(log + text, "loading weights", "", 1) == kind


def test_memory_that_runs_out_while_graphs_are_captured_is_memory():
    text = "Capturing CUDA graphs\nCUDA out of memory\nstream is capturing"
    assert classify_death(text, "capturing graphs", 1) == MEMORY
    assert classify_death("", "capturing graphs", 137) == MEMORY  # killed by the kernel
    assert classify_death("", "capturing graphs", 1) == CAPTURE


def test_a_hang_without_a_word_is_classified_by_where_its_ranks_wait():
    stack = "Thread 1 (idle): all_reduce (torch/distributed/distributed_c10d.py:2806)"
    assert classify_hang("", "loading weights", stack, 2) == COLLECTIVE
    assert classify_hang("", "loading weights", "forward (model.py:1)", 2) == HANG
    assert classify_hang("", "capturing graphs", stack, 2) == CAPTURE


def test_every_remedy_changes_one_setting_that_was_not_so_before():
    config = EngineConfig(Path("/t"), compile=True, tensor_parallel=2)
    for kind in (COLLECTIVE, CAPTURE, KERNEL, HANG, MEMORY, CACHE):
        tries = remedies(kind, config)
        assert tries, kind
        for name, changed in tries:
            differs = [f for f in config.__annotations__
                       if getattr(changed, f) != getattr(config, f)]  # fmt: skip
            assert len(differs) == 1, name
    for kind in (PORT, CHECKPOINT, DIED):
        assert remedies(kind, config) == []  # no setting would mend it
    already = replace(config, compile=False, p2p=False, tensor_parallel=1)
    assert remedies(COLLECTIVE, already) == []


def test_an_mla_target_gets_a_backend_that_knows_mla(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"kv_lora_rank": 512}}')
    names = [c.attention_backend for _, c in remedies(KERNEL, EngineConfig(tmp_path))]
    assert names[0] == "TRITON_MLA"
    sglang = EngineConfig(tmp_path, engine="sglang", attention_backend="triton")
    assert remedies(KERNEL, sglang)[0][1].attention_backend == "flashinfer"
