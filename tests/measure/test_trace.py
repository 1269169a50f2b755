"""Traces of both shapes: every instant once, kinds that sum to the wall time, clear refusals."""

from __future__ import annotations

import gzip
from itertools import pairwise

import pytest
from trace_shapes import cpu_events, event, op, scope, sglang_cuda, vllm_cuda, write_trace

from eagle3lib.lab.errors import UserError
from eagle3lib.measure.profile import step_times
from eagle3lib.measure.trace import read_trace, timeline
from eagle3lib.measure.trace_kinds import (
    ATTENTION,
    COLLECTIVES,
    COPIES,
    DRAFTER,
    ELEMENTWISE,
    HOST,
    IDLE,
    KINDS,
    MATRIX,
    OTHER,
    SAMPLING,
    is_drafter,
    is_sampling,
    kind_of,
    step_of,
)

PREFILL = "execute_context_1(9)_generation_0(0)"
DECODE = "execute_context_0(0)_generation_1(1)"


def us(seconds_by_kind):
    """Microseconds without what is zero; torch's times are sums that lose a thousandth."""
    return {k: round(1e6 * s, 1) for k, s in seconds_by_kind.items() if round(1e6 * s, 1)}


@pytest.mark.parametrize("name", ["a.pt.trace.json", "a.pt.trace.json.gz"])
def test_a_round_on_a_cpu_by_hand(tmp_path, name):
    """The worked round of ``trace_shapes.cpu_round``: self times, the prompt and the pause between
    requests left out, another thread too."""
    found = step_times(write_trace(tmp_path / name, cpu_events()))
    assert us(found["kinds"]) == {
        MATRIX: 100, ATTENTION: 100, ELEMENTWISE: 40, SAMPLING: 100, DRAFTER: 300, OTHER: 20,
        HOST: 140, IDLE: 200,
    }  # fmt: skip
    assert us(found["drafter_kinds"]) == {MATRIX: 100, SAMPLING: 50, HOST: 150}
    assert (found["device"], found["steps"], found["marked_steps"]) == ("cpu", 4, 6)
    assert found["step_s"] == pytest.approx(1000e-6)
    assert {"name": "mystery::thing", "kind": OTHER} in [
        {k: n[k] for k in ("name", "kind")} for n in found["names"]
    ]


def test_on_a_cpu_what_a_compiled_graph_does_between_library_calls_is_elementwise(tmp_path):
    """Inductor's loops (norm, rotary, activation) run under the graph's name alone; seen as 8 % of
    a step with vLLM 0.32, where the calls between them keep their own kinds."""
    events = []
    for at in (0, 1000, 2000):
        events += [
            scope(DECODE, at, at + 800),
            op("## Call CompiledFxGraph None ##", at + 100, at + 700),
            op("_C::onednn_mm", at + 160, at + 560),
            op("vllm::unified_attention_with_output", at + 580, at + 680),
        ]
    found = step_times(write_trace(tmp_path / "a.trace.json", events))
    assert us(found["kinds"]) == {MATRIX: 400, ATTENTION: 100, ELEMENTWISE: 100, HOST: 200,
                                  IDLE: 200}  # fmt: skip


@pytest.mark.parametrize("shape", [vllm_cuda, sglang_cuda])
def test_a_round_on_a_gpu_by_hand(tmp_path, shape):
    """Kernels behind their launches; what overlaps counts once, a collective what it adds."""
    found = step_times(write_trace(tmp_path / "x-TP-0.trace.json.gz", shape()))
    assert us(found["kinds"]) == {
        MATRIX: 200, ATTENTION: 100, SAMPLING: 20, DRAFTER: 200, COPIES: 10, COLLECTIVES: 100,
        IDLE: 370,
    }  # fmt: skip
    assert us(found["drafter_kinds"]) == {MATRIX: 200}
    assert (found["device"], found["steps"], found["marked_steps"]) == ("gpu", 3, 8)


@pytest.mark.parametrize("shape", [cpu_events, vllm_cuda, sglang_cuda])
def test_the_kinds_sum_to_the_wall_time_and_no_instant_is_counted_twice(tmp_path, shape):
    path = write_trace(tmp_path / "a.trace.json", shape())
    found = step_times(path)
    assert list(found["kinds"]) == list(KINDS) and min(found["kinds"].values()) >= 0
    assert sum(found["kinds"].values()) == pytest.approx(found["step_s"], rel=1e-9)
    assert sum(found["drafter_kinds"].values()) == pytest.approx(found["kinds"][DRAFTER])
    pieces = timeline(read_trace(path))
    assert all(a.end <= b.start for a, b in pairwise(pieces))
    assert all(p.end > p.start for p in pieces)


def test_a_child_that_ends_after_its_parent_takes_nothing_from_what_follows(tmp_path):
    """Clock ticks of torch's own times let it."""
    events = [
        scope(DECODE, 0, 50), op("aten::linear", 10, 30), op("aten::addmm", 20, 31),
        op("aten::silu", 30, 40), scope(DECODE, 100, 150),
    ]  # fmt: skip
    found = step_times(write_trace(tmp_path / "a.trace.json", events))
    assert us(found["kinds"]) == {MATRIX: 20, ELEMENTWISE: 10, HOST: 20, IDLE: 50}


def test_without_scopes_of_the_drafter_its_work_is_told_as_the_targets(tmp_path):
    """The page says so; here it must not be lost."""
    bare = [e for e in cpu_events() if not e["name"].startswith("gpu_model_runner: draft")]
    found = step_times(write_trace(tmp_path / "a.trace.json", bare))
    assert us(found["kinds"])[MATRIX] == 200 and DRAFTER not in us(found["kinds"])
    assert us(found["kinds"])[IDLE] == 350  # between its operators no scope holds the host


BAD = [
    ([], "empty"),
    ([scope(DECODE, 0, 5), scope(DECODE, 9, 12)], "empty"),
    ([op("aten::mm", 0, 5)], "no steps: 0 marks"),
    ([scope(PREFILL, 0, 5), op("aten::mm", 0, 5), scope(PREFILL, 8, 9)], "no steps: 2 marks"),
    ([scope(DECODE, 0, 5), op("aten::mm", 0, 5)], "no steps: 1 marks"),
    ([event("cpu_op", "aten::mm", 0, 5) | {"ts": "soon"}], "can't be read"),
]


@pytest.mark.parametrize(("events", "told"), BAD, ids=[told for _, told in BAD])
def test_a_trace_that_says_nothing_is_one_clear_message(tmp_path, events, told):
    path = write_trace(tmp_path / "a.trace.json", events)
    with pytest.raises(UserError, match=told) as error:
        step_times(path)
    assert str(path) in str(error.value) and error.value.next


def test_a_trace_that_is_broken_off_is_said_to_be(tmp_path):
    path = write_trace(tmp_path / "a.trace.json", cpu_events())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    packed = tmp_path / "b.trace.json.gz"
    packed.write_bytes(gzip.compress(whole)[:-200])
    page = tmp_path / "c.trace.json.gz"
    page.write_bytes(b"<html>")
    damaged = tmp_path / "d.trace.json.gz"
    packed_whole = gzip.compress(whole)
    half = len(packed_whole) // 2
    damaged.write_bytes(packed_whole[:half] + bytes(9) + packed_whole[half + 9 :])
    numbers = write_trace(tmp_path / "e.trace.json", [1, 2])
    for broken in (path, packed, page, damaged, numbers):
        with pytest.raises(UserError, match="can't be read"):
            step_times(broken)


NAMES = [
    (MATRIX, "aten::addmm", "aten::mm", "_C::onednn_mm", "nvjet_tst_192x8_64x10_2x1_v_bz_TNT",
     "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_64x1_tn_align8>",
     "void cublasLt::splitKreduce_kernel<32, 16, int, float>", "fused_moe_kernel",
     "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, __nv_bfloat16>",
     "triton_tem_fused_addmm_3", "_C::weight_packed_linear", "_C::fused_experts_cpu", "_C::bmm_cpu",
     "void marlin::Marlin<__nv_bfloat16>"),
    (ATTENTION, "vllm::unified_attention_with_output", "_C::cpu_attention_with_kv_cache",
     "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>",
     "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "kernel_unified_attention_2d",
     "fmhaSm100aKernel_QkvBfloat16", "void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>",
     "aten::scaled_dot_product_attention", "_C::get_scheduler_metadata", "_C::mla_decode_kvcache",
     "_C::cpu_attn_reshape_and_cache", "_C::chunk_gated_delta_rule_cpu"),
    (ELEMENTWISE, "_C::rms_norm", "aten::silu", "triton_red_fused__to_copy_add_mean_mul_0",
     "triton_poi_fused_mm_silu_2", "void at::native::vectorized_elementwise_kernel<4, ...>",
     "_C::rotary_embedding", "_C::silu_and_mul", "aten::embedding", "aten::add_", "topk_softmax",
     "cpp_fused_add_mul_1", "## Call CompiledFxGraph fq2wmmk ##",
     "_C::dynamic_scaled_int8_quant", "_C::moe_align_block_size"),
    (SAMPLING, "aten::argmax", "aten::topk", "aten::multinomial", "rejection_greedy_sample_kernel",
     "void VerifyTreeGreedy<int, long>(int*)", "aten::exponential_"),
    (COLLECTIVES, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)",
     "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", "c10d::allreduce_",
     "vllm::all_gather", "_C::shm_allreduce", "_C::shm_gather"),
    (COPIES, "Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "aten::copy_", "aten::to",
     "aten::item", "aten::_local_scalar_dense"),
    (None, "aten::expand", "aten::view", "mystery::thing", "execute"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, *names in NAMES for name in names]
)
def test_names_of_engines_and_libraries(kind, name):
    assert kind_of(name) == kind


def test_marks_and_scopes_of_both_engines():
    assert step_of("execute_context_0(0)_generation_3(12)").decodes == 3
    assert not step_of("execute_context_1(9)_generation_3(12)").is_decode
    assert step_of("execute_context_0(sq0sk0sqsq0sqsk0)_generation_1(sq1sk9sqsq1sqsk9)").is_decode
    assert step_of("step[DECODE bs=4]").decodes == 4
    assert step_of("step[TARGET_VERIFY bs=4]").verify
    assert not step_of("step[EXTEND bs=1 toks=107]").is_decode
    assert step_of("gpu_model_runner: forward") is None
    for name in ("gpu_model_runner: draft", "draft_extend",
                 "sglang/srt/speculative/eagle_worker_v2.py(410): draft",
                 "vllm/v1/spec_decode/llm_base_proposer.py(512): propose"):  # fmt: skip
        assert is_drafter(name)
    assert not is_drafter("vllm/v1/spec_decode/metrics.py(9): observe")
    assert is_sampling("vllm/v1/sample/rejection_sampler.py(80): forward")
