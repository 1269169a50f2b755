"""Which positions and labels of packed conversations the loss is over."""

import math

import pytest
import torch

from eagle3lib.drafter.model import PackedRows, unroll
from eagle3lib.training.loss import (
    Teacher,
    draft_ids,
    label_steps,
    step_counts,
    ttt_loss,
)

STEPS = 5
# Some prompts are so short that a step beyond the end of the row before lands on their answer.
LENGTHS, PROMPTS = [10, 13, 7, 8], [4, 1, 1, 1]


@pytest.fixture(scope="module")
def batch(random_drafter):
    """A drafter that holds 110 of 300 ids, four conversations, and a target's head [V, H]."""
    drafter = random_drafter(30, draft_vocab_size=110)
    generator = torch.Generator().manual_seed(7)
    rows = PackedRows.pack(
        [torch.randint(0, 300, (n,), generator=generator) for n in LENGTHS], PROMPTS
    )
    states = torch.randn(sum(LENGTHS), 3 * 64, generator=generator)
    normed = torch.randn(sum(LENGTHS), 64, generator=generator)
    head = torch.randn(300, 64, generator=generator) * 0.3
    with torch.no_grad():
        made = unroll(drafter, rows, states, STEPS, feed="truth")
    return drafter, rows, made, normed, head


def losses(batch, greedy=None, kind="kl", whole=False):
    """(loss with every position counting one, counts of each step)"""
    drafter, rows, made, normed, head = batch
    logits = normed @ head.T
    greedy = logits.argmax(-1) if greedy is None else greedy
    labels = label_steps(rows, greedy, draft_ids(drafter.t2d), STEPS)
    teacher = Teacher(normed, head[drafter.t2d], logits.logsumexp(-1) if whole else None)
    with torch.no_grad():
        loss, sums = ttt_loss(drafter, made, labels, teacher, [1.0] * STEPS, kind=kind)
    return float(loss), step_counts(labels, sums)


def log_softmax(scores):
    peak = max(scores)
    norm = peak + math.log(sum(math.exp(s - peak) for s in scores))
    return [s - norm for s in scores]


def plain(batch, step):
    """(positions, inside, right, kl, overlap) of one step, without the library's indices."""
    drafter, _, made, normed, head = batch
    allowed = [i for i in range(300) if drafter.t2d[i]]
    positions = inside = right = 0
    loss, overlap, index, start = 0.0, 0.0, 0, 0
    for length, n in zip(LENGTHS, PROMPTS, strict=True):
        for p in range(n - 1, length - 2):
            hidden, index = made[step].hidden[index], index + 1
            if p + 2 + step > length - 1:
                continue  # x[p+2+k] does not exist
            positions += 1
            # The target's distribution after x[p+1+k].
            scores = (head.double() @ normed[start + p + 1 + step].double()).tolist()
            best = max(range(300), key=scores.__getitem__)
            if best not in allowed:
                continue
            inside += 1
            x = hidden.double()
            x = x / math.sqrt(float((x * x).mean()) + 1e-5) * drafter.norm.weight.double()
            log_q = log_softmax((drafter.lm_head.weight.double() @ x).tolist())
            log_p = log_softmax([scores[i] for i in allowed])
            loss += sum(math.exp(a) * (a - b) for a, b in zip(log_p, log_q, strict=True))
            of_all = log_softmax(scores)
            overlap += sum(
                min(math.exp(of_all[i]), math.exp(b)) for i, b in zip(allowed, log_q, strict=True)
            )
            right += allowed[max(range(len(allowed)), key=log_q.__getitem__)] == best
        start += length
    return positions, inside, right, loss, overlap


@pytest.mark.parametrize("step", range(STEPS))
def test_loss_is_the_plain_loss(batch, step):
    positions, inside, right, loss, overlap = plain(batch, step)
    counts = losses(batch, whole=True)[1][step]
    assert (counts.positions, counts.inside, counts.right) == (positions, inside, right)
    assert 0 < inside < positions, "the data should hold both kinds"
    assert counts.loss_sum == pytest.approx(loss, rel=1e-5)
    assert counts.overlap_sum == pytest.approx(overlap, rel=1e-5)


def test_loss_is_the_sum_over_steps(batch):
    loss, counts = losses(batch)
    assert loss == pytest.approx(sum(c.loss_sum for c in counts), rel=1e-6)


def test_mass_outside_the_draft_vocabulary_is_never_accepted(batch):
    """The whole vocabulary's probabilities overlap less than the renormalised ones."""
    inner, whole = losses(batch, kind="lk")[1], losses(batch, kind="lk", whole=True)[1]
    for a, b in zip(inner, whole, strict=True):
        assert b.overlap_sum < a.overlap_sum < a.inside
        assert b.loss_sum > a.loss_sum


def test_labels_beyond_the_end_are_no_positions(batch):
    """An answer of m tokens has m - 1 drafted ones at step 0, and one less at each step."""
    for step, counts in enumerate(losses(batch)[1]):
        answers = [t - n for t, n in zip(LENGTHS, PROMPTS, strict=True)]
        assert counts.positions == sum(max(0, m - 1 - step) for m in answers)


def test_states_without_a_label_don_t_count(batch):
    """The last state of a conversation (its next token is unknown) and the prompt's carry no loss:
    they may hold anything."""
    drafter, rows, made, normed, head = batch
    spoilt, start = normed.clone(), 0
    for length, n in zip(LENGTHS, PROMPTS, strict=True):
        spoilt[start : start + n] = 50.0
        spoilt[start + length - 1] = -50.0
        start += length
    assert losses((drafter, rows, made, spoilt, head)) == losses(batch)


def test_steps_beyond_every_answer_have_no_loss(random_drafter):
    drafter = random_drafter(31)
    rows = PackedRows.pack([torch.arange(6), torch.arange(7)], [4, 4])  # two and three tokens
    with torch.no_grad():
        made = unroll(drafter, rows, torch.randn(13, 192), STEPS, feed="truth")
    _, counts = losses((drafter, rows, made, torch.randn(13, 64), torch.randn(300, 64)))
    assert [c.positions for c in counts] == [3, 1, 0, 0, 0]
    assert [c.loss_sum for c in counts[2:]] == [0.0, 0.0, 0.0]


def test_teacher_outside_the_draft_vocabulary_carries_no_loss(batch):
    """Such a draft can't be accepted whatever the drafter says: counted, but not learnt from."""
    drafter, _, _, normed, _ = batch
    loss, counts = losses(batch, torch.full((len(normed),), int((~drafter.t2d).nonzero()[0])))
    assert loss == 0
    for count in counts:
        assert (count.loss_sum, count.inside, count.right, count.overlap_sum) == (0, 0, 0, 0)
        assert count.positions > 0


def test_draft_ids_undo_the_map(batch):
    drafter = batch[0]
    draft_of = draft_ids(drafter.t2d)
    held = torch.arange(len(drafter.d2t))
    assert torch.equal(draft_of[drafter.target_ids(held)], held)
    assert (draft_of[~drafter.t2d] == -1).all()
