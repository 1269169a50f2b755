"""The simulator against a speculative loop that is played round by round, from scratch."""

import random

import pytest
import torch

from eagle3lib.drafter.model import PackedRows, unroll
from eagle3lib.drafter.simulate import Conversation, Replay, histogram, replay_rounds, simulate


def play(answer, steps, propose):
    """Serve ``answer`` by greedy speculation. ``propose(done)`` drafts what follows the first
    ``done`` answer tokens; the target would say the answer's own next token, and stops at its end.
    """
    done, accepted = 1, []  # the first token came with the prefill
    while done < len(answer):
        right = 0
        for draft, truth in zip(propose(done), answer[done:], strict=False):
            if draft != truth:
                break
            right += 1
        accepted.append(right)
        done += right + 1  # ... and the target's own token, cut off at the answer's end
    return accepted


def from_scratch(drafter, conversation, steps):
    """Rounds of one conversation; each knows only the tokens and states that exist by then."""
    n, answer = conversation.prompt_tokens, conversation.token_ids[conversation.prompt_tokens :]

    def propose(done):
        known = conversation.token_ids[: n + done]
        base = n + done - 2  # the last token whose state exists: the target has not read the newest
        # One token that nobody knows yet: a base position needs a label to be one.
        tokens = torch.cat((known, torch.zeros(1, dtype=torch.int64)))
        states = torch.zeros(len(tokens), conversation.states.shape[1])
        states[: base + 1] = conversation.states[: base + 1]
        with torch.no_grad():
            made = unroll(
                drafter, PackedRows.pack([tokens], [base + 1]), states, steps, feed="draft"
            )
        return [int(step.drafts[0]) for step in made]

    return play(answer.tolist(), steps, propose)


def self_made(drafter, prompt, states, prompt_tokens, answer_tokens, wrong_every, rng):
    """A conversation whose answer is mostly what the drafter itself drafts, so that some accept."""
    tokens = list(prompt)
    while len(tokens) < prompt_tokens + answer_tokens:
        base = len(tokens) - 2
        rows = PackedRows.pack([torch.tensor([*tokens, 0])], [base + 1])
        with torch.no_grad():
            made = unroll(drafter, rows, states[: len(tokens) + 1], 6, feed="draft")
        for step in made:
            right = rng.random() > 1 / wrong_every
            tokens.append(int(step.drafts[0]) if right else rng.randrange(300))
    total = prompt_tokens + answer_tokens
    return Conversation(torch.tensor(tokens[:total]), prompt_tokens, states[:total])


@pytest.fixture(scope="module")
def played(random_drafter):
    """Conversations of answers of 0 to 30 tokens, in no order of length."""
    drafter, rng = random_drafter(11, draft_vocab_size=150), random.Random(3)
    generator = torch.Generator().manual_seed(3)
    made = []
    for answer_tokens in (12, 1, 30, 2, 7, 21, 0, 3, 18, 4):
        n = rng.randrange(2, 9)
        prompt = torch.randint(0, 300, (n + 1,), generator=generator).tolist()
        states = torch.randn(n + answer_tokens + 8, 3 * 64, generator=generator)
        made.append(self_made(drafter, prompt, states, n, answer_tokens, 4, rng))
    return drafter, made


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_simulate_is_the_round_by_round_loop(played, steps):
    drafter, conversations = played
    replays = simulate(drafter, conversations, steps, batch_rows=3)
    expected = [from_scratch(drafter, item, steps) for item in conversations]
    assert [r.accepted for r in replays] == expected
    accepted = [count for rounds in expected for count in rounds]
    assert set(accepted) == set(range(steps + 1)), "the data should show every outcome"


def test_batching_changes_nothing(played):
    drafter, conversations = played
    one = simulate(drafter, conversations, 3, batch_rows=1)
    assert simulate(drafter, conversations, 3, batch_rows=8) == one
    assert simulate(drafter, conversations[::-1], 3, batch_rows=4) == one[::-1]


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_every_answer_token_is_accounted_for(played, steps):
    drafter, conversations = played
    for item, replay in zip(conversations, simulate(drafter, conversations, steps), strict=True):
        check_accounting(replay, len(item.token_ids) - item.prompt_tokens, steps)


def check_accounting(replay, answer_tokens, steps):
    """Each round gives its accepted drafts and one token of the target's own. All tokens but the
    prefill's come that way; a round whose drafts reach the answer's end has no own token."""
    given = sum(replay.accepted) + len(replay.accepted)
    wanted = max(answer_tokens - 1, 0)
    assert given in (wanted, wanted + 1)
    if replay.cut:
        assert given == wanted + 1
        assert replay.accepted[-1] < steps
    assert all(0 <= count <= steps for count in replay.accepted)


def test_replay_accounts_on_random_drafts():
    rng = random.Random(8)
    for _ in range(500):
        steps, length = rng.randrange(1, 6), rng.randrange(0, 15)
        answer = [rng.randrange(2) for _ in range(length)]
        drafts = torch.tensor([[rng.randrange(2) for _ in range(steps)] for _ in answer[1:]])
        drafts = drafts.view(-1, steps)
        replay = replay_rounds(drafts, answer, steps)
        check_accounting(replay, length, steps)
        assert replay.accepted == play(answer, steps, lambda done, d=drafts: d[done - 1].tolist())


# Drafts are rows of proposals made after answer token 0, 1, ...; 0 never stands in an answer.
@pytest.mark.parametrize(
    ("answer", "drafts", "accepted", "cut"),
    [
        # all K at once, then a mismatch that the target mends
        ([5, 6, 7, 8, 9], [[6, 7, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]], [2, 0], False),
        ([5, 6, 7, 8, 9], [[6, 7, 8], [0, 0, 0], [0, 0, 0], [0, 0, 0]], [3], False),
        # full K, full K: the bonus token of the second round would lie beyond the end
        ([1, 2, 3, 4, 5, 6], [[2, 3], [0, 0], [0, 0], [5, 6], [0, 0]], [2, 2], False),
        # mismatch at once, every round
        ([5, 6, 7, 8], [[0, 7, 8], [0, 8, 0], [0, 0, 0]], [0, 0, 0], False),
        # right later in the row does not count after a wrong one
        ([5, 6, 7, 8], [[6, 0, 8], [0, 0, 0], [0, 0, 0]], [1, 0], False),
        # the answer ends within the last round's drafts, with and without one before
        ([5, 6, 7], [[0, 0, 0], [7, 4, 4]], [0, 1], True),
        ([5, 6, 7], [[6, 7, 4], [0, 0, 0]], [2], True),
        # ... and exactly at its K-th draft: nothing more could have been accepted
        ([5, 6, 7], [[6, 7], [0, 0]], [2], False),
        ([5, 6], [[6, 4, 4]], [1], True),
        ([5, 6], [[6]], [1], False),
        ([5, 6], [[0, 0, 0]], [0], False),
    ],
)
def test_replay_of_hand_made_rows(answer, drafts, accepted, cut):
    steps = len(drafts[0])
    assert replay_rounds(torch.tensor(drafts), answer, steps) == Replay(accepted, cut)


@pytest.mark.parametrize("answer", [[], [7]])
def test_answers_without_a_drafted_token_have_no_round(answer):
    assert replay_rounds(torch.empty(0, 3, dtype=torch.int64), answer, 3) == Replay([], False)


@pytest.mark.parametrize("rounds", [1, 4])
def test_a_drafter_that_says_what_the_target_says_is_accepted_whole(rounds):
    """tau = K + 1: an oracle's every draft is accepted."""
    steps = 3
    answer = list(range(10, 10 + 1 + rounds * (steps + 1)))
    # ... also in its last round: what follows the end is never asked for.
    drafts = [[after + 1 + k for k in range(steps)] for after in answer[:-1]]
    replay = replay_rounds(torch.tensor(drafts), answer, steps)
    assert replay == Replay([steps] * rounds, False)


def test_own_drafts_are_accepted_whole(random_drafter):
    """An answer made of the drafter's own drafts, one chain a round: every round accepts K."""
    drafter, steps, n, rounds = random_drafter(12, draft_vocab_size=150), 4, 5, 3
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(60, 3 * 64, generator=generator)
    tokens = torch.randint(0, 300, (n + 1,), generator=generator).tolist()
    for _ in range(rounds):
        rows = PackedRows.pack([torch.tensor([*tokens, 0])], [len(tokens) - 1])
        with torch.no_grad():
            made = unroll(drafter, rows, states[: len(tokens) + 1], steps, feed="draft")
        # the target's own token after the accepted drafts can be anything
        tokens += [int(step.drafts[0]) for step in made] + [17]
    item = Conversation(torch.tensor(tokens), n, states[: len(tokens)])
    assert simulate(drafter, [item], steps) == [Replay([steps] * rounds, False)]


def test_histogram_counts_rounds():
    assert histogram([[0, 2, 2], [], [3, 0]], 3) == [2, 0, 2, 1]
