"""The loss against a plain one: a loop over positions, a softmax over the allowed ids, fp64."""

import math

import pytest
import torch

from eagle3lib.drafter.model import PackedRows, unroll
from eagle3lib.training.loss import make_teacher, step_loss

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


def losses(batch):
    drafter, rows, made, normed, head = batch
    allowed = torch.arange(300)[drafter.t2d]
    greedy = (normed @ head.T).argmax(-1)
    teacher = make_teacher(rows, normed, greedy, head[allowed], STEPS)
    with torch.no_grad():
        return [step_loss(drafter, rows, step, teacher, k) for k, step in enumerate(made)]


def log_softmax(scores):
    peak = max(scores)
    norm = peak + math.log(sum(math.exp(s - peak) for s in scores))
    return [s - norm for s in scores]


def plain(batch, step, end=LENGTHS):
    """(positions, inside, right, loss) of one step, written without the library's indices."""
    drafter, _, made, normed, head = batch
    allowed = [i for i in range(300) if drafter.t2d[i]]
    positions = inside = right = 0
    loss, index, start = 0.0, 0, 0
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
            loss -= sum(math.exp(a) * b for a, b in zip(log_p, log_q, strict=True))
            right += allowed[max(range(len(allowed)), key=log_q.__getitem__)] == best
        start += length
    return positions, inside, right, loss


@pytest.mark.parametrize("step", range(STEPS))
def test_loss_is_the_plain_loss(batch, step):
    positions, inside, right, loss = plain(batch, step)
    found, counts = losses(batch)[step]
    assert (counts.positions, counts.inside, counts.right) == (positions, inside, right)
    assert 0 < inside < positions, "the data should hold both kinds"
    assert float(found) == pytest.approx(loss, rel=1e-5)
    assert counts.loss_sum == pytest.approx(loss, rel=1e-5)


def test_labels_beyond_the_end_are_no_positions(batch):
    """An answer of m tokens has m - 1 drafted ones at step 0, and one less at each step."""
    for step, (_, counts) in enumerate(losses(batch)):
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
    before, after = losses(batch), losses((drafter, rows, made, spoilt, head))
    assert [counts for _, counts in after] == [counts for _, counts in before]


def test_steps_beyond_every_answer_have_no_loss(random_drafter):
    drafter = random_drafter(31)
    rows = PackedRows.pack([torch.arange(6), torch.arange(7)], [4, 4])  # two and three tokens
    with torch.no_grad():
        made = unroll(drafter, rows, torch.randn(13, 192), STEPS, feed="truth")
    normed, head = torch.randn(13, 64), torch.randn(300, 64)
    batch = (drafter, rows, made, normed, head)
    found = losses(batch)
    assert [counts.positions for _, counts in found] == [3, 1, 0, 0, 0]
    assert [float(loss) for loss, _ in found[2:]] == [0.0, 0.0, 0.0]


def test_teacher_outside_the_draft_vocabulary_carries_no_loss(batch):
    """Such a draft can't be accepted whatever the drafter says: counted, but not learnt from."""
    drafter, rows, made, normed, head = batch
    greedy = torch.full((len(normed),), int((~drafter.t2d).nonzero()[0]))
    teacher = make_teacher(rows, normed, greedy, head[drafter.t2d], STEPS)
    for step, out in enumerate(made):
        loss, counts = step_loss(drafter, rows, out, teacher, step)
        assert (float(loss.detach()), counts.inside, counts.right) == (0.0, 0, 0)
        assert counts.positions > 0


def test_loss_is_least_where_the_drafter_says_what_the_target_says(batch, monkeypatch):
    """Cross-entropy >= the target's entropy, equal at q = p (Gibbs)."""
    drafter, rows, made, normed, head = batch
    allowed = torch.arange(300)[drafter.t2d]
    greedy = (normed @ head.T).argmax(-1)
    teacher = make_teacher(rows, normed, greedy, head[allowed], 1)
    loss, counts = step_loss(drafter, rows, made[0], teacher, 0)
    used = [p for p in (rows.row_start + rows.base + 1).tolist() if bool(drafter.t2d[greedy[p]])]
    log_p = teacher.log_probs[teacher.row_of[used]].double()
    entropy = float(-(log_p.exp() * log_p).sum())
    assert float(loss.detach()) > entropy + 0.1
    assert counts.inside == len(used)

    # A drafter that gives, at the loss positions, the teacher's own logits.
    monkeypatch.setattr(drafter, "logits", lambda hidden: log_p.float())
    best, counts = step_loss(drafter, rows, made[0], teacher, 0)
    assert float(best.detach()) == pytest.approx(entropy, rel=1e-5)
    assert counts.right == counts.inside
