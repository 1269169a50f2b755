"""The counting rule against a case counted by hand, and against what the reference executes."""

from __future__ import annotations

import dataclasses

import torch
from torch.utils.flop_counter import FlopCounterMode

from eagle3lib.drafter.model import PackedRows, unroll
from eagle3lib.training.arithmetic import gemm_peak, needed_operations


def test_operations_by_hand(random_drafter):
    """H = 2, A = 3, G = 3, M = 5, S = 6, D = 4; T = 6 tokens, 2 of them prompt: bases 1, 2, 3.

    Step 0 drafts x3, x4, x5 and step 1 drafts x4, x5; x4 is outside the draft vocabulary.
    """
    config = dataclasses.replace(
        random_drafter().config, hidden_size=2, target_hidden_size=2, intermediate_size=5,
        num_attention_heads=1, num_key_value_heads=1, head_dim=3, draft_vocab_size=4,
    )  # fmt: skip
    t2d = torch.ones(20, dtype=torch.bool)
    t2d[14] = False
    row = (torch.arange(10, 16), 2)
    assert needed_operations(config, [row], t2d, 2) == {
        "fc": 4 * 4 * 6 * 2,
        "target's keys": 6 * 4 * 4 * 6,
        "layer": 6 * (3 + 2) * (4 * 3 + 3 * 2 + 3 * 2 * 5),
        "own keys": 6 * 2 * 4 * 6,
        "attention": 12 * 3 * ((2 + 3 + 4) + (3 + 4)),
        "head": 6 * 3 * 4 * 2,
        "teacher": 2 * 3 * 4 * 2,
    }
    twice = needed_operations(config, [row, row, (torch.arange(3), 2)], t2d, 2)
    assert twice["head"] == 2 * 6 * 3 * 4 * 2  # an answer of one token needs nothing


def test_no_more_is_counted_than_the_reference_executes(random_drafter):
    """torch's own count of a forward and backward of the reference, which wastes some of it."""
    drafter = random_drafter(3, draft_vocab_size=200)
    drafter.embed_tokens.weight.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    ids, prompt, steps = torch.randint(0, 300, (40,), generator=generator), 12, 5
    rows = PackedRows.pack([ids], [prompt])
    states = torch.randn(40, 3 * 64, generator=generator)
    with FlopCounterMode(display=False) as counted:
        made = unroll(drafter, rows, states, steps, feed="truth")
        torch.stack(
            [drafter.logits(step.hidden).logsumexp(-1).sum() for step in made]
        ).sum().backward()
    needed = needed_operations(drafter.config, [(ids, prompt)], drafter.t2d, steps)
    needed.pop("teacher")
    assert sum(needed.values()) <= counted.get_total_flops() < 2 * sum(needed.values())


def test_the_peak_leaves_the_threads_as_they_were(monkeypatch):
    monkeypatch.setattr("eagle3lib.training.arithmetic._SIZES", (64,))
    before = torch.get_num_threads()
    assert gemm_peak(before + 1, "float32") > 0
    assert torch.get_num_threads() == before
