"""What layers are like: measures of likeness by their laws, the logit lens by the target itself."""

from __future__ import annotations

import pytest
import torch

from eagle3lib.target import layer_stats as stats
from eagle3lib.target.model import TargetHead
from eagle3lib.target.states import StateStore


@pytest.fixture(scope="module")
def found(tiny_target, tiny_model, tiny_states):
    store = StateStore(tiny_states)
    entries = stats.pick_entries(store, 3, set())
    return stats.gather_states(store, entries, 10**6, tiny_target.num_layers, tiny_model)


def test_the_stored_slots_are_the_layers_before_them(found, tiny_target, tiny_states):
    store = StateStore(tiny_states)
    entries = stats.pick_entries(store, 3, set())
    stored = stats.gather_states(store, entries, 10**6, tiny_target.num_layers)
    assert torch.equal(stored.position, found.position)
    for index, layer in enumerate(stored.layers[:-1]):
        ours = found.states[found.layers.index(layer)]
        assert torch.allclose(stored.states[index], ours, atol=1e-4)


def test_the_lens_over_the_last_state_is_the_target_itself(found, tiny_target):
    """The rows are the target's own greedy answers: its last state names each next token."""
    lens = stats.logit_lens(found, TargetHead(tiny_target))
    assert lens.right[-1].all()
    assert lens.right.shape == (len(found.layers), len(found.position))
    assert lens.right[0].float().mean() < 0.5


def test_likeness_is_one_with_itself_and_the_same_both_ways(found):
    for matrix in (stats.cka_matrix(found), stats.cosine_matrix(found)):
        assert torch.allclose(matrix.diagonal(), torch.ones(len(matrix)), atol=1e-4)
        assert torch.allclose(matrix, matrix.T, atol=1e-5)
        assert matrix.abs().max() <= 1 + 1e-4


def test_cka_sees_through_rotation_and_scale_and_the_cosine_does_not(found):
    turn, _ = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    states = torch.stack((found.states[3], 5 * found.states[3] @ turn))
    turned = stats.LayerStates(
        (3, 4), (3,), states, states[:, :1], found.row, found.position, found.next_ids,
        found.drafted_ids,
    )  # fmt: skip
    assert stats.cka_matrix(turned)[0, 1] == pytest.approx(1, abs=1e-4)
    assert abs(stats.cosine_matrix(turned)[0, 1]) < 0.5
