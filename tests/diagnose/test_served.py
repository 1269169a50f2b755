"""What an engine would draft: the plain reading is the simulator, and rounds are compared where the
engine started them."""

from __future__ import annotations

import math

import pytest
import torch

from eagle3lib.diagnose.evidence import lookup_hits
from eagle3lib.diagnose.outcomes import explained_up_to, outcomes
from eagle3lib.diagnose.served import (
    Answered,
    Setting,
    accepted_at,
    drafts_of,
    replays,
    round_starts,
    rounds_equal,
)
from eagle3lib.diagnose.variants import engine_variants, mended_variants
from eagle3lib.diagnose.waterfall import _with_losses
from eagle3lib.drafter.simulate import Conversation, simulate
from eagle3lib.target.forward import forward_states

LAYERS = tuple(range(1, 11))
ROPE = {"rope_type": "default", "rope_theta": 100.0}


@pytest.fixture(scope="module")
def answered(tiny_model, tiny_rows):
    out = []
    for r in tiny_rows:
        ids = r.prompt_token_ids + r.answer_token_ids
        states = forward_states(tiny_model, [ids], LAYERS)[0][:, :-1]
        out.append(
            Answered(
                r.id, r.set, torch.tensor(ids), len(r.prompt_token_ids), states, LAYERS, [], []
            )
        )
    return out


@pytest.fixture
def base(random_drafter):
    drafter = random_drafter(seed=3)
    return Setting(drafter, drafter.config.slots, 3)


def test_the_plain_setting_is_the_simulator(base, answered):
    talks = [Conversation(a.token_ids, a.prompt_tokens, a.slots(base.slots)) for a in answered]
    theirs = simulate(base.drafter, talks, 3)
    assert replays(drafts_of(base, answered), answered, 3) == theirs


def test_every_variant_drafts_otherwise_and_leaves_the_drafter_alone(base, answered):
    """A variant that changed nothing could prove nothing; one that changed the drafter itself
    would taint all that come after it."""
    before = {k: v.clone() for k, v in base.drafter.state_dict().items()}
    plain = torch.cat(drafts_of(base, answered))
    for variant in engine_variants(10):
        setting = variant.apply(base)
        if setting is not None and variant.label not in ("eight bits", "prompt's draft keys lost"):
            assert not torch.equal(torch.cat(drafts_of(setting, answered)), plain), variant.label
    assert torch.equal(torch.cat(drafts_of(base, answered)), plain)
    assert all(torch.equal(v, before[k]) for k, v in base.drafter.state_dict().items())


def test_variants_that_mean_nothing_are_left_out(base, tiny_target):
    """No scaling to drop, no map to misread (whole vocabulary), the target's very rotary."""
    labels = {v.label for v in engine_variants(10) if v.apply(base) is not None}
    assert "rotary scaling dropped" not in labels and "default slots" not in labels
    assert "offsets read as ids" not in labels and "fc_norm skipped" not in labels
    mended = mended_variants(10, ROPE, base.drafter.embed_tokens.weight)
    left = {v.label for v in mended if v.apply(base) is None}
    assert {"the target's rotary", "the target's embeddings", "d2t as absolute ids"} <= left


def test_rounds_are_compared_where_the_engine_started_them():
    """Answer 10..17. Drafts are right at bases 0 and 4 alone. The engine accepted 2, 1, 2: its next
    round starts at base 3, whatever the simulator's own second round is."""
    answer = torch.arange(10, 18)
    drafts = torch.zeros(7, 2, dtype=torch.int64)
    drafts[0] = torch.tensor([11, 12])
    drafts[4] = torch.tensor([15, 99])
    a = Answered("x", "workload", torch.cat((torch.tensor([1, 2]), answer)), 2,
                 torch.empty(10, 0, 1), (), [2, 1, 2], [2, 2, 2])  # fmt: skip
    assert accepted_at(drafts, a.answer) == [2, 0, 0, 0, 1, 0, 0]
    assert round_starts([2, 1, 2]) == [0, 3, 5]
    # The third round, at base 5, reaches the end of the answer and is not compared.
    assert rounds_equal(drafts, a) == (1, 2)


def test_late_draft_steps_leave_the_first_draft_alone(base, answered):
    (late,) = (v for v in engine_variants(10) if v.label == "draft steps one position late")
    plain, found = (torch.cat(drafts_of(s, answered)) for s in (base, late.apply(base)))
    assert torch.equal(plain[:, 0], found[:, 0]) and not torch.equal(plain[:, 1], found[:, 1])


def test_a_fault_is_explained_by_the_drafts_that_are_the_variants(base, monkeypatch):
    """The drafter as exported is right at the first draft, the variant at all three, the engine at
    two: by two drafts it is the variant, by all three it is neither."""
    answer = torch.arange(100, 160)
    right = answer[1:, None] + torch.arange(3)
    none = torch.full_like(right, -1)

    def drafts(setting, answers):
        return [right if setting.chain else torch.cat([right[:, :1], none[:, 1:]], 1)]

    monkeypatch.setattr("eagle3lib.diagnose.outcomes.drafts_of", drafts)
    ids = torch.cat([torch.tensor([1, 2]), answer])
    recorded = Answered("x", "workload", ids, 2, torch.empty(62, 0, 1), (), [2] * 18, [3] * 18)
    (late,) = (v for v in engine_variants(10) if v.label == "draft steps one position late")
    plain, found = outcomes(base, [late], [recorded])
    assert plain.up_to == ((18, 18), (0, 18)) and found.up_to == ((18, 18), (18, 18))
    assert plain.rounds_equal == found.rounds_equal == 0
    assert explained_up_to([plain, found], 18) == 2
    assert explained_up_to([plain, found], 19) is None


def test_a_record_beyond_the_answer_is_unequal():
    a = Answered("x", "workload", torch.arange(6), 2, torch.empty(6, 0, 1), (), [0] * 9, [2] * 9)
    equal, total = rounds_equal(torch.zeros(3, 2, dtype=torch.int64), a)
    assert total - equal >= 6


def test_the_gain_of_nothing_is_nothing(base, answered):
    table = outcomes(base, [], answered)
    assert len(table) == 1 and table[0].gain == 0 and math.isfinite(table[0].gain_error)


def test_losses_add_up_to_the_whole_fall():
    levels = _with_losses([("a", 4.0), ("b", 3.1), ("c", 3.3), ("d", 1.7)])
    assert sum(level["lost"] for level in levels) == pytest.approx(4.0 - 1.7)
    assert levels[2]["lost"] < 0  # a level above the one before is no loss


def test_prompt_lookup_counts_what_the_text_itself_would_have_drafted():
    assert lookup_hits([1, 2, 3, 9, 1, 2, 3], prompt=4) == 1  # (1, 2) -> 3 was seen
    assert lookup_hits([1, 2, 3, 4, 5, 6], prompt=3) == 0
