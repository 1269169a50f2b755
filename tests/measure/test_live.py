"""Following a live endpoint: differences of counters, and an alarm with the stated false alarms."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fake_engine import FakeEngine
from typer.testing import CliRunner

from eagle3lib.cli import app
from eagle3lib.lab.errors import UserError
from eagle3lib.measure.live import (
    DriftAlarm,
    Look,
    Reference,
    look_between,
    parse_metrics,
    read_metrics,
    read_reference,
    threshold,
)

VLLM = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {rounds}
vllm:spec_decode_num_drafts_total{{engine="1"}} 0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {at0}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {at1}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0"}} {tokens}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} 4
vllm:time_to_first_token_seconds_sum 0.8
vllm:time_to_first_token_seconds_count 4
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} 3
"""
SGLANG = """\
# TYPE sglang:generation_tokens counter
sglang:generation_tokens_total {tokens}
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{tp_rank="0"}} 2.5
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs 1
"""
# Half of the rounds accept step 1, half of those step 2.
REFERENCE = Reference(100_000, 75_000, [50_000, 25_000], spread=1.0, spread_measured=True)


def vllm(rounds, accepted=0.75, **changes):
    values = {"rounds": rounds, "drafted": 2 * rounds, "accepted": accepted * rounds,
              "at0": rounds * accepted * 2 / 3, "at1": rounds * accepted / 3,
              "tokens": rounds * (1 + accepted)}  # fmt: skip
    return VLLM.format(**values | changes)


def look(rounds, accepted):
    return Look(1.0, rounds + accepted, 1, rounds, accepted, [], 1, None, None)


def test_looks_are_differences_not_totals():
    before, after = parse_metrics(vllm(1000)), parse_metrics(vllm(1400, 0.65))
    seen = look_between(before, after, 10.0)
    assert (seen.rounds, seen.accepted, seen.running) == (400, 910 - 750, 3)
    assert seen.acceptance_length == pytest.approx(1.4)
    assert seen.tokens_per_s == pytest.approx((1400 * 1.65 - 1750) / 10)
    assert not seen.rough and not seen.restarted
    assert len(seen.per_step) == 2


def test_a_server_that_was_started_anew_is_no_negative_rate():
    seen = look_between(parse_metrics(vllm(1000)), parse_metrics(vllm(100)), 10.0)
    assert seen.restarted and (seen.rounds, seen.accepted) == (100, 75)


def test_sglang_tells_a_gauge_from_which_rounds_follow_roughly():
    before, after = (parse_metrics(SGLANG.format(tokens=n)) for n in (1000, 2000))
    seen = look_between(before, after, 10.0)
    assert seen.rough and (seen.rounds, seen.accepted) == (400, 600)
    assert seen.acceptance_length == pytest.approx(2.5)


def test_metrics_of_something_else_are_named():
    fake = FakeEngine(metrics="# TYPE up gauge\nup 1\n")
    try:
        with pytest.raises(UserError, match="no engine's"):
            read_metrics(fake.url)
    finally:
        fake.close()
    with pytest.raises(UserError, match="no metrics"):
        read_metrics(fake.url)


def looks_until_alarm(rng, accept, every, most):
    """Looks until the alarm, with independent rounds of two steps that accept with ``accept``."""
    alarm = DriftAlarm(REFERENCE, every)
    for i in range(1, most + 1):
        first = rng.random(400) < accept
        second = first & (rng.random(400) < 0.5)
        if alarm.add(look(400, int(first.sum() + second.sum()))):
            return i
    return most


def test_false_alarms_come_as_seldom_as_stated():
    """Mean looks between false alarms: 50 stated; the formula is known to be near, not exact."""
    rng = np.random.default_rng(0)
    runs = [looks_until_alarm(rng, 0.5, 50, 2000) for _ in range(150)]
    assert 35 < np.mean(runs) < 80


def test_a_fall_is_found_soon_and_a_rise_never():
    rng = np.random.default_rng(1)
    assert np.mean([looks_until_alarm(rng, 0.42, 1000, 500) for _ in range(20)]) < 8
    assert looks_until_alarm(rng, 0.6, 1000, 300) == 300


def test_a_slow_fall_adds_up():
    """One look of it is within the noise: z is about 1, no single test would fire."""
    rng = np.random.default_rng(2)
    assert np.mean([looks_until_alarm(rng, 0.47, 1000, 500) for _ in range(20)]) < 60


def test_few_rounds_are_gathered_before_they_count():
    alarm = DriftAlarm(REFERENCE, 1000, min_rounds=200)
    assert not any(alarm.add(look(10, 0)) for _ in range(19))
    assert alarm.looks == 0
    alarm.add(look(10, 0))
    assert alarm.looks == 1 and alarm.last_z > 5


def test_the_threshold_grows_with_the_patience():
    limits = [threshold(every) for every in (10, 100, 1000, 1e6)]
    assert limits == sorted(limits) and limits[2] == pytest.approx(5.07, abs=0.05)


def test_variance_of_a_round_by_hand():
    """Half accept 0, a quarter 1, a quarter 2: mean 0.75, E[a^2] 1.25."""
    assert REFERENCE.variance == pytest.approx(1.25 - 0.75**2)


def test_a_reference_is_read_out_of_a_benchmark(tmp_path):
    path = tmp_path / "metrics.json"
    told = {"rounds": 100, "accepted": 75, "accepted_at": [50, 25], "spread": 2.5}
    path.write_text(json.dumps({"arms": [], "reference": told}))
    assert read_reference(path) == Reference(100, 75, [50, 25], 2.5, True)
    path.write_text(json.dumps(told | {"spread": None}))
    assert not read_reference(path).spread_measured
    for nothing in ({"arms": []}, {"rounds": 0}, []):
        path.write_text(json.dumps(nothing))
        with pytest.raises(UserError, match="no reference"):
            read_reference(path)


@pytest.mark.parametrize(("accepted", "code"), [(0.75, 0), (0.3, 1)], ids=["as ever", "drifted"])
def test_watch_exits_with_an_alarm_on_drift(tmp_path, accepted, code):
    reads = iter(range(1000, 10**6, 4000))
    fake = FakeEngine(metrics=lambda: vllm(next(reads), accepted))
    reference = tmp_path / "reference.json"
    reference.write_text(json.dumps({"rounds": 10**5, "accepted": 75_000,
                                     "accepted_at": [50_000, 25_000]}))  # fmt: skip
    saved = tmp_path / "saved.json"
    try:
        done = CliRunner().invoke(app, [
            "watch", fake.url, "--reference", str(reference), "--interval", "0.1",
            "--looks", "4", "--save", str(saved),
        ])  # fmt: skip
    finally:
        fake.close()
    assert done.exit_code == code, done.output
    assert ("drift: the acceptance length fell" in done.output) == bool(code)
    assert json.loads(saved.read_text())["rounds"] >= 4000
