"""Acceptance by group on counts that are known: which rounds count where, and what is named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from eagle3lib.data.rows import AnswerRow
from eagle3lib.diagnose.evidence import Evidence
from eagle3lib.diagnose.groups import (
    Talk,
    _groups,
    _shares,
    _splits,
    acceptance_groups,
    groups_that_differ,
    main_script,
)
from eagle3lib.diagnose.rules_groups import groups as rule
from eagle3lib.measure.arms import OWN, RequestRow
from eagle3lib.report.diagnosis_figures import acceptance_by_group, groups_table


def request(i, accepted, tokens=None, counts=None, prompt=10, name="workload"):
    tokens = tokens or 1 + len(accepted) + sum(accepted)
    return RequestRow(OWN, name, f"p{i}", 0, [1] * prompt, [5] * tokens, "length", 1.0, accepted,
                      None if accepted is None else [3] * len(accepted), counts=counts)  # fmt: skip


def answer(i, *, split="heldout", system=False, tokens=40, thinking="missing"):
    messages = [{"role": "system", "content": "be brief"}] * system
    return AnswerRow(f"p{i}", "workload", split, [*messages, {"role": "user", "content": "x"}],
                     [1] * 10, [5] * tokens, "x", "length", reasoning_kind=thinking)  # fmt: skip


def by_name(groups):
    return {g.name: g for g in groups}


def test_a_round_belongs_to_the_first_token_that_it_guesses():
    """Answer tokens 0..6: rounds start at 0 and 3. The first guesses token 1, a "prose" one, the
    second token 4, a "code" one; the third starts at 6, the last token, and is the last token's."""
    row = request(0, [2, 2, 0], tokens=7)
    names = ["prose"] * 4 + ["code"] * 3
    found = by_name(_groups("kind of text", [(row, names)], None, None))
    assert (found["prose"].rounds, found["prose"].accepted) == (1, 2)
    assert (found["code"].rounds, found["code"].accepted) == (2, 2)
    assert found["code"].length == 2.0 and found["code"].rest_length == 3.0
    assert (found["prose"].tokens, found["code"].tokens) == (3, 3)  # token 0 is never drafted
    assert found["prose"].coverage is None and found["prose"].small


def test_coverage_is_of_the_tokens_that_could_be_drafted():
    row = RequestRow(OWN, "workload", "p", 0, [1], [7, 0, 0, 7], "length", 1.0, [2], [3])
    t2d = torch.tensor([True] + [False] * 7)
    (group,) = _groups("tools", [(row, "with")], t2d, None)
    assert (group.inside, group.tokens) == (2, 3)


def test_an_engine_without_the_order_of_rounds_has_groups_of_whole_answers_only():
    told = {"rounds": 4, "accepted": 6, "drafted": None, "accepted_at": None, "source": "sglang"}
    row = request(0, None, tokens=11, counts=told)
    (whole,) = _groups("tools", [(row, "with")], None, None)
    assert (whole.rounds, whole.accepted, whole.length) == (4, 6, 2.5)
    (inner,) = _groups("place", [(row, ["0 to 15"] * 11)], None, None)
    assert inner.rounds == 0 and inner.length is None


def test_what_can_not_be_told_is_in_no_group():
    named = [(request(0, [1, 1]), ""), (request(1, [0, 0]), "on")]
    (group,) = _groups("thinking", named, None, None)
    assert (group.name, group.rounds, group.rest_rounds) == ("on", 2, 0)
    assert group.served_share == 1.0


def mixed(low, high, answers=20):
    """Answers of which every second is of the group "on", with ``low`` accepted drafts a round."""
    out = []
    for i in range(answers):
        drafts = low if i % 2 else high
        out.append((request(i, [drafts, (drafts + i // 2) % 3] * 10), "on" if i % 2 else "off"))
    return out


def test_a_difference_is_named_beyond_four_standard_errors():
    groups = _groups("thinking", mixed(0, 2), None, {"on": 0.1, "off": 0.9})
    on, off = by_name(groups)["on"], by_name(groups)["off"]
    assert on.deviation < -4 and off.deviation > 4 and on.deviation == pytest.approx(-off.deviation)
    assert on.low <= on.length <= on.high < off.low
    assert [g.name for g in groups_that_differ(groups, 4.0, 0.1)] == ["on"]
    assert groups_that_differ(groups, 4.0, 2.5) == []


def test_equal_groups_are_not_told_apart():
    groups = _groups("thinking", mixed(1, 1), None, None)
    assert all(abs(g.deviation) < 4 for g in groups)
    assert groups_that_differ(groups, 4.0, 0.1) == []


def test_small_groups_say_so_and_accuse_nobody():
    groups = _groups("thinking", mixed(0, 2, answers=6), None, {"on": 0.0, "off": 1.0})
    assert all(g.small and g.low is None and g.deviation is None for g in groups)
    assert groups_that_differ(groups, 4.0, 0.1) == []


def evidence(groups, read=True):
    target = SimpleNamespace(folder="target")
    return Evidence(SimpleNamespace(target=target), groups=groups, text_read=read)


def test_a_low_group_that_was_hardly_trained_on_is_a_warning_and_else_a_note():
    rare = rule(evidence(_groups("thinking", mixed(0, 2), None, {"on": 0.1, "off": 0.9})))
    assert [(c.code, c.severity) for c in rare] == [("group-undertrained", "warning")]
    assert "'on'" in rare[0].title and "10% of the trained" in rare[0].evidence
    known = rule(evidence(_groups("thinking", mixed(0, 2), None, {"on": 0.5, "off": 0.5})))
    assert [(c.code, c.severity) for c in known] == [("group-differs", "note")]
    unknown = rule(evidence(_groups("place", mixed(0, 2), None, None)))
    assert [c.code for c in unknown] == ["group-differs"]
    on = by_name(_groups("place", mixed(0, 2), None, None))["on"]
    assert unknown[0].cost == pytest.approx((on.rest_length - on.length) * on.rounds / 400)
    assert [c.code for c in rule(evidence([], read=False))] == ["text-not-grouped"]


def test_groups_of_a_run_come_from_its_own_rows(tiny_target):
    rows = [request(i, [1, 2] * 16, prompt=70 if i < 6 else 10) for i in range(12)]
    rows += [request(i, [0] * 32, name="general") for i in range(12, 18)]
    asked = [answer(i, system=i < 3, thinking="complete" if i % 2 else "missing")
             for i in range(12)]  # fmt: skip
    trained = [answer(i, split="train", tokens=10 if i else 30) for i in range(20, 23)]
    material = SimpleNamespace(
        answers=asked + trained, target=tiny_target, drafter=None, vocab=None,
        first_answers=lambda name: [r for r in rows if r.set == name],
    )  # fmt: skip
    groups, _ = acceptance_groups(material)
    found = {(g.split, g.name): g for g in groups}
    assert found["set of prompts", "workload"].length == 2.5
    assert found["set of prompts", "general"].length == 1.0
    assert found["system message", "with"].answers == 3 and found["system message", "with"].small
    assert found["thinking", "on"].answers == found["thinking", "off"].answers == 6
    assert (
        found["thinking", "off"].trained_share == 1.0 and found["thinking", "on"].trained_share == 0
    )
    assert found["prompt tokens", "64 to 255"].answers == 6
    places = [g.name for g in groups if g.split == "place in the answer"]
    assert places == ["0 to 15", "16 to 63", "64 to 255"]
    lines = [g.as_dict() for g in groups]
    assert len(groups_table(lines).data) == len(groups)
    drawn = acceptance_by_group(lines).data[0]
    assert "set of prompts: general" in drawn.y and not any(y.startswith("tools") for y in drawn.y)


def test_kind_of_text_follows_the_tokens_and_shares_are_of_tokens():
    texts = {1: "word", 2: "字", 3: "\n```\n"}
    splits = _splits(lambda ids: "".join(texts[i] for i in ids), [])
    talk = Talk("workload", 3, [1, 2, 3, 1, 3, 2], None)
    assert splits["kind of text"](talk) == [
        "Latin", "CJK", "numbers and signs", "code", "code", "CJK"
    ]  # fmt: skip
    assert _shares([talk], splits["kind of text"])["CJK"] == pytest.approx(2 / 6)
    assert main_script("абв a") == "Cyrillic" and main_script("12 3") == "no letters"


def test_nothing_to_split_is_said_in_the_figure():
    figure = acceptance_by_group([])
    assert "No rounds" in figure.layout.title.text
