"""A warm start goes on from somebody's drafter: its weights, its slots, its vocabulary map."""

from collections import Counter

import pytest
import torch

from eagle3lib.drafter.checkpoint import write_drafter
from eagle3lib.drafter.vocab import build_vocab_map
from eagle3lib.drafter.warm_start import checkpoint_vocab, load_for_training, vocab_of
from eagle3lib.lab.errors import UserError
from eagle3lib.target.model import TargetHead


@pytest.fixture(scope="module")
def head(tiny_target):
    return TargetHead(tiny_target)


@pytest.fixture
def saved(random_drafter, head, tmp_path):
    """(drafter, its folder); its map holds 90 random tokens."""
    drafter = random_drafter(20, draft_vocab_size=90, fc_norm=True)
    drafter.embed_tokens.weight.data.copy_(head.embedding)
    write_drafter(tmp_path, drafter, torch.float32)
    return drafter, tmp_path


def other_map(size):
    return build_vocab_map(Counter(dict.fromkeys(range(100, 280), 1)), 300, size)


def test_it_is_the_checkpoint(saved, tiny_target, head):
    drafter, folder = saved
    vocab = checkpoint_vocab(folder, tiny_target, head)
    again = load_for_training(folder, tiny_target, head, vocab=vocab, slots=(2, 5, 7))
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert again.fc.weight.dtype == torch.float32


@pytest.mark.parametrize("size", [90, 120])
def test_another_map_is_refused_and_both_are_named(saved, tiny_target, head, size):
    """A head trained on under another map: its rows would mean other tokens."""
    drafter, folder = saved
    vocab = other_map(size)
    shared = int((drafter.t2d & vocab.t2d).sum())
    with pytest.raises(UserError, match=rf"90 tokens; the given one has {size}, {shared} of them"):
        load_for_training(folder, tiny_target, head, vocab=vocab)


@pytest.mark.parametrize("size", [40, 90, 120])
def test_another_map_by_the_switch_moves_rows_with_their_tokens(saved, tiny_target, head, size):
    drafter, folder = saved
    vocab = other_map(size)
    changed = load_for_training(folder, tiny_target, head, vocab=vocab, replace_vocab=True)
    assert torch.equal(vocab_of(changed).d2t, vocab.d2t)
    assert changed.config.draft_vocab_size == size
    own = {int(token): row for row, token in enumerate(vocab_of(drafter).target_ids)}
    kept = 0
    for row, token in enumerate(vocab.target_ids.tolist()):
        expected = drafter.lm_head.weight[own[token]] if token in own else head.head[token]
        assert torch.equal(changed.lm_head.weight[row], expected)
        kept += token in own
    assert 0 < kept < size
    assert torch.equal(changed.fc_norm[1].weight, drafter.fc_norm[1].weight)


def test_other_slots_are_refused(saved, tiny_target, head):
    _, folder = saved
    with pytest.raises(UserError, match=r"states \[2, 5, 7\], the captured ones are \[1, 5, 7\]"):
        load_for_training(folder, tiny_target, head, slots=(1, 5, 7))
