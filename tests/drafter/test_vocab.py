"""The law of the draft vocabulary: target id = draft id + d2t[draft id], rising, true in t2d."""

import random
from collections import Counter

import pytest
import torch

from eagle3lib.drafter.vocab import (
    VocabMap,
    build_vocab_map,
    check_vocab_map,
    count_tokens,
    coverage_counts,
)
from eagle3lib.lab.errors import UserError


def random_counts(rng, vocab_size, seen):
    return Counter({i: rng.randrange(1, 5) for i in rng.sample(range(vocab_size), seen)})


@pytest.mark.parametrize("seed", range(20))
def test_the_law(seed):
    """On random counts, some with fewer tokens than D, some with D = V, some with forced ids."""
    rng = random.Random(seed)
    vocab_size = rng.randrange(5, 200)
    size = vocab_size if seed % 4 == 0 else rng.randrange(3, vocab_size + 1)
    forced = rng.sample(range(vocab_size), min(size, rng.randrange(0, 4)))
    counts = random_counts(rng, vocab_size, rng.randrange(0, vocab_size + 1))
    vocab = build_vocab_map(counts, vocab_size, size, forced)

    assert vocab.d2t.dtype == torch.int64
    assert vocab.t2d.dtype == torch.bool
    assert (len(vocab.d2t), len(vocab.t2d), int(vocab.t2d.sum())) == (size, vocab_size, size)
    marked = [i for i in range(vocab_size) if vocab.t2d[i]]
    assert vocab.target_ids.tolist() == marked
    assert [draft + int(vocab.d2t[draft]) for draft in range(size)] == marked
    for target_id, draft_id in enumerate(vocab.draft_ids.tolist()):
        assert draft_id == (marked.index(target_id) if target_id in marked else -1)
    assert check_vocab_map(vocab.d2t, vocab.t2d) == []

    # Chosen and left-out ids: forced are in; else more counts first, the lower id at a tie.
    assert set(forced) <= set(marked)
    free = [i for i in range(vocab_size) if i not in forced]
    best = sorted(free, key=lambda i: (-counts[i], i))[: size - len(forced)]
    assert set(marked) == set(forced) | set(best)


def test_ties_go_to_the_lower_id():
    counts = Counter({9: 2, 4: 2, 7: 2, 1: 1})
    assert build_vocab_map(counts, 10, 2).target_ids.tolist() == [4, 7]


def test_forced_ids_push_out_the_rarest():
    counts = Counter({3: 5, 4: 4, 5: 3})
    assert build_vocab_map(counts, 10, 3, forced=[9]).target_ids.tolist() == [3, 4, 9]
    assert build_vocab_map(counts, 10, 3, forced=[9, 3, 9]).target_ids.tolist() == [3, 4, 9]


def test_unseen_ids_fill_up_from_below():
    assert build_vocab_map(Counter({7: 1}), 10, 4).target_ids.tolist() == [0, 1, 2, 7]


def test_whole_vocabulary_has_offsets_of_zero():
    vocab = build_vocab_map(Counter({5: 1}), 8, 8)
    assert vocab.d2t.tolist() == [0] * 8
    assert vocab.t2d.all()


@pytest.mark.parametrize("size", [0, 11, -1])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(UserError, match=f"draft_vocab_size {size}"):
        build_vocab_map(Counter({1: 1}), 10, size)


@pytest.mark.parametrize(
    ("counts", "forced"), [({10: 1}, []), ({-1: 1}, []), ({1: 1}, [10]), ({1: 1}, [-1])]
)
def test_ids_outside_the_vocabulary_are_refused(counts, forced):
    """A forced id (a stop id of a padded tokenizer) used to end in an IndexError, or wrap."""
    with pytest.raises(UserError, match=r"token id (10|-1) is outside .* 10"):
        build_vocab_map(Counter(counts), 10, 4, forced)


def test_more_forced_ids_than_places_are_refused():
    """They used to be dropped in silence, stop tokens among them."""
    with pytest.raises(UserError, match="3 forced ids"):
        build_vocab_map(Counter({1: 1}), 10, 2, forced=[5, 6, 7])


def made():
    vocab = build_vocab_map(Counter({3: 1, 5: 2, 8: 9}), 10, 3)
    return vocab.d2t, vocab.t2d


def problem(d2t, t2d):
    findings = check_vocab_map(d2t, t2d, "folder/file")
    assert [(f.code, f.severity, f.where) for f in findings] == [
        ("vocab-map", "error", "folder/file")
    ]
    return findings[0].title


def test_absolute_ids_are_named_as_such():
    d2t, t2d = made()
    assert "absolute" in problem(d2t + torch.arange(3), t2d)


def test_int32_is_refused():
    d2t, t2d = made()
    assert "int32" in problem(d2t.to(torch.int32), t2d)


def test_sizes_must_agree():
    d2t, t2d = made()
    more = t2d.clone()
    more[0] = True
    assert "t2d marks 4 tokens, d2t holds 3" in problem(d2t, more)
    assert "t2d marks 3 tokens, d2t holds 2" in problem(d2t[:2], t2d)


def test_other_tokens_are_refused():
    d2t, t2d = made()
    assert "different tokens" in problem(d2t, t2d.roll(1))


def test_coverage_by_hand():
    vocab = build_vocab_map(Counter({3: 1, 5: 2, 8: 9}), 10, 3)
    assert coverage_counts(vocab, [[3, 3, 5, 0], [8], [], [9, 1]]) == (4, 7)
    assert coverage_counts(vocab, []) == (0, 0)


def test_count_tokens():
    assert count_tokens([[1, 1, 2], [], [2]]) == {1: 2, 2: 2}


def test_save_and_load(tmp_path):
    vocab, path = build_vocab_map(Counter({3: 1}), 10, 3), tmp_path / "map.safetensors"
    vocab.save(path)
    again = VocabMap.load(path)
    assert torch.equal(again.d2t, vocab.d2t)
    assert torch.equal(again.t2d, vocab.t2d)


def test_load_checks_the_law(tmp_path):
    d2t, t2d = made()
    path = tmp_path / "map.safetensors"
    VocabMap(d2t + torch.arange(3), t2d).save(path)
    with pytest.raises(UserError, match=r"(?s)absolute.*map\.safetensors"):
        VocabMap.load(path)
    with pytest.raises(UserError, match="no vocabulary map"):
        VocabMap.load(tmp_path / "missing.safetensors")
