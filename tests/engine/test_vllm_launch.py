"""What a client reads of vLLM: its counters, its record of rounds, the model that it serves."""

import pytest

from eagle3lib.engine.client import Client, parse_speculation_counters
from eagle3lib.lab.errors import UserError

# As vLLM writes it: every counter has a `_created` twin, a gauge that holds a time, and every
# engine (data parallelism) has its own samples.
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="target"} 5.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.7e+09
vllm:spec_decode_num_drafts_created{engine="1",model_name="target"} 1.7e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 20.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="target"} 10.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 9.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="target"} 4.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="target",position="0"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="target",position="1"} 1.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_created Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_created gauge
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="0"} 1.7e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="target"} 3.0
"""


def test_counters_are_summed_over_engines_and_their_created_twins_left_out(httpserver):
    counts = parse_speculation_counters(METRICS)
    assert counts == {
        "drafts": 15, "draft_tokens": 30, "accepted_tokens": 13,
        "accepted_at_0": 9, "accepted_at_1": 4,
    }  # fmt: skip
    at = [counts[f"accepted_at_{i}"] for i in range(2)]
    assert sum(at) == counts["accepted_tokens"] and at == sorted(at, reverse=True)
    httpserver.expect_request("/metrics").respond_with_data(METRICS)
    assert Client(httpserver.url_for("/")).speculation_counters() == counts


def test_an_engine_without_speculation_has_no_counters():
    assert parse_speculation_counters("") == {}
    only = METRICS[METRICS.index("# HELP vllm:num_requests") :]
    assert parse_speculation_counters(only) == {}


def reply(**more):
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [7, 8, 9],
              "message": {"role": "assistant", "content": "x"}}  # fmt: skip
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "target",
            "choices": [choice], "prompt_token_ids": [1, 2], **more}  # fmt: skip


@pytest.mark.parametrize("metrics", [None, {}, {"speculative_decoding": None}])
def test_an_answer_without_an_engines_record_has_no_rounds(httpserver, metrics):
    httpserver.expect_request("/v1/chat/completions").respond_with_json(reply(metrics=metrics))
    answer = Client(httpserver.url_for("/")).chat([], max_tokens=3, temperature=0)
    assert answer.rounds is None
    assert (answer.prompt_token_ids, answer.answer_token_ids) == ([1, 2], [7, 8, 9])


def test_an_engines_record_of_rounds_is_read(httpserver):
    record = {"per_step_accepted": [2, 0, 1], "per_step_drafted": [3, 3, 2]}
    body = reply(metrics={"speculative_decoding": record})
    httpserver.expect_request("/v1/chat/completions").respond_with_json(body)
    answer = Client(httpserver.url_for("/")).chat([], max_tokens=3, temperature=0)
    assert (answer.rounds.accepted, answer.rounds.drafted) == ([2, 0, 1], [3, 3, 2])


@pytest.mark.parametrize(("served", "used"), [(["target"], "target"), (["a", "b"], "a"),
                                              (["a", "target"], "target")])  # fmt: skip
def test_our_own_name_is_asked_for_when_it_is_served_else_the_first(httpserver, served, used):
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "x"} for name in served]
    httpserver.expect_request("/v1/models").respond_with_json({"object": "list", "data": data})
    assert Client(httpserver.url_for("/")).model() == used


@pytest.mark.parametrize("status", [404, 500])
def test_an_address_that_serves_no_models_is_a_user_error(httpserver, status):
    httpserver.expect_request("/v1/models").respond_with_data("no", status=status)
    with pytest.raises(UserError, match="next:"):
        Client(httpserver.url_for("/"), retries=0).model()
