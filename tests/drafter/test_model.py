"""``unroll`` against a naive drafter: one conversation, one base position, one key at a time."""

import math

import pytest
import torch

from eagle3lib.drafter.layers import turn_halves
from eagle3lib.drafter.model import PackedRows, unroll

STEPS = 4
LENGTHS, PROMPTS = [9, 14, 6, 11], [3, 7, 2, 9]


def rms_norm(x, weight, eps):
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def turned(head, position, theta):
    """Rotary by its formula: the pair (i, i + d/2) turns by position * theta^(-2i/d)."""
    half = len(head) // 2
    out = torch.empty_like(head)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(head))
        a, b = float(head[i]), float(head[i + half])
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


class Naive:
    """The drafter as formats.md tells it, on single vectors."""

    def __init__(self, drafter):
        self.c, self.w = drafter.config, drafter.state_dict()
        self.offsets = self.w["d2t"]

    def heads(self, name, mixed, count, position=None):
        parts = (self.w[f"midlayer.self_attn.{name}.weight"] @ mixed).view(count, -1)
        if position is None:
            return list(parts)
        theta = self.c.rope_parameters["rope_theta"]
        return [turned(part, position, theta) for part in parts]

    def mixed(self, token, hidden):
        w, eps = self.w, self.c.rms_norm_eps
        embedded = w["embed_tokens.weight"][token]
        return torch.cat((
            rms_norm(embedded, w["midlayer.input_layernorm.weight"], eps),
            rms_norm(hidden, w["midlayer.hidden_norm.weight"], eps),
        ))  # fmt: skip

    def key_value(self, token, hidden, position):
        mixed, kv = self.mixed(token, hidden), self.c.num_key_value_heads
        return self.heads("k_proj", mixed, kv, position), self.heads("v_proj", mixed, kv)

    def layer(self, token, hidden, position, pairs):
        """One pass of the layer; ``pairs`` are all keys and values it may look at."""
        w, c = self.w, self.c
        group = c.num_attention_heads // c.num_key_value_heads
        read = []
        queries = self.heads("q_proj", self.mixed(token, hidden), c.num_attention_heads, position)
        for index, query in enumerate(queries):
            kv = index // group
            scores = [float(query @ key[kv]) / math.sqrt(c.head_dim) for key, _ in pairs]
            powers = [math.exp(s - max(scores)) for s in scores]
            read.append(
                sum(
                    p / sum(powers) * value[kv] for p, (_, value) in zip(powers, pairs, strict=True)
                )
            )
        residual = hidden + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(read)
        x = rms_norm(residual, w["midlayer.post_attention_layernorm.weight"], c.rms_norm_eps)
        gate = w["midlayer.mlp.gate_proj.weight"] @ x
        up = w["midlayer.mlp.up_proj.weight"] @ x
        return residual + w["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def draft(self, hidden):
        logits = self.w["lm_head.weight"] @ rms_norm(
            hidden, self.w["norm.weight"], self.c.rms_norm_eps
        )
        best = int(logits.argmax())
        return best + int(self.offsets[best])

    def chain(self, tokens, states, base, steps, feed):
        """[(hidden, draft)] of the steps from one base position of one conversation."""
        fused = [self.w["fc.weight"] @ state for state in states]
        pairs = [self.key_value(tokens[i + 1], fused[i], i) for i in range(base + 1)]
        hidden, token, made = fused[base], tokens[base + 1], []
        for step in range(steps):
            if step > 0:
                pairs.append(self.key_value(token, hidden, base + step))
            hidden = self.layer(token, hidden, base + step, pairs)
            made.append((hidden, self.draft(hidden)))
            after = min(base + 2 + step, len(tokens) - 1)
            token = made[-1][1] if feed == "draft" else tokens[after]
        return made


@pytest.fixture
def conversations():
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(0, 300, (n,), generator=generator) for n in LENGTHS]
    states = [torch.randn(n, 3 * 64, generator=generator) for n in LENGTHS]
    return rows, states


def run(drafter, rows, prompts, states, feed, steps=STEPS):
    with torch.no_grad():
        made = unroll(drafter, PackedRows.pack(rows, prompts), torch.cat(states), steps, feed=feed)
    hidden = torch.stack([step.hidden for step in made], dim=1)  # [P, K, H]
    drafts = torch.stack([step.drafts for step in made], dim=1) if feed == "draft" else None
    return hidden, drafts


def same(found, expected):
    """Equal but for fp32 rounding (the states grow with the steps)."""
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("feed", "heads", "kv_heads"),
    [("truth", 4, 2), ("draft", 4, 2), ("draft", 4, 4), ("truth", 4, 1)],
)
def test_unroll_is_the_naive_drafter(random_drafter, conversations, feed, heads, kv_heads):
    drafter = random_drafter(
        3, draft_vocab_size=120, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    rows, states = conversations
    hidden, drafts = run(drafter, rows, PROMPTS, states, feed)
    naive, index = Naive(drafter), 0
    for tokens, state, n in zip(rows, states, PROMPTS, strict=True):
        for base in range(n - 1, len(tokens) - 2):
            for step, (expected, draft) in enumerate(
                naive.chain(tokens.tolist(), state, base, STEPS, feed)
            ):
                same(hidden[index, step], expected)
                if feed == "draft":
                    assert drafts[index, step] == draft
            index += 1
    assert index == len(hidden) == sum(t - n - 1 for t, n in zip(LENGTHS, PROMPTS, strict=True))


@pytest.mark.parametrize("feed", ["truth", "draft"])
def test_packing_changes_nothing(random_drafter, conversations, feed):
    """No cross-talk: a conversation alone is what it is between others, in any order."""
    drafter = random_drafter(4, draft_vocab_size=120)
    rows, states = conversations
    alone = [
        run(drafter, [r], [n], [s], feed) for r, n, s in zip(rows, PROMPTS, states, strict=True)
    ]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        packed, drafts = run(
            drafter, [rows[i] for i in order], [PROMPTS[i] for i in order],
            [states[i] for i in order], feed,
        )  # fmt: skip
        same(packed, torch.cat([alone[i][0] for i in order]))
        if feed == "draft":
            assert torch.equal(drafts, torch.cat([alone[i][1] for i in order]))


@pytest.mark.parametrize("length", [5, 6])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_conversation_without_base_position_in_a_pack(random_drafter, conversations, length, place):
    """A prompt of 5 with an answer of none or one token: the others' outputs don't notice it."""
    drafter = random_drafter(4, draft_vocab_size=120)
    rows, states = conversations[0][:2], conversations[1][:2]
    expected, _ = run(drafter, rows, PROMPTS[:2], states, "draft")
    short, its_states = torch.arange(length), torch.ones(length, 3 * 64)
    found, _ = run(
        drafter,
        [*rows[:place], short, *rows[place:]],
        [*PROMPTS[:place], 5, *PROMPTS[place:2]],
        [*states[:place], its_states, *states[place:]],
        "draft",
    )
    same(found, expected)


def test_pack_of_nothing_but_short_conversations(random_drafter):
    hidden, drafts = run(
        random_drafter(), [torch.arange(5), torch.arange(6)], [5, 5],
        [torch.ones(5, 192), torch.ones(6, 192)], "draft",
    )  # fmt: skip
    assert hidden.shape == (0, STEPS, 64)
    assert drafts.shape == (0, STEPS)


@pytest.mark.parametrize("base", range(2, 7))
def test_the_future_changes_nothing(random_drafter, conversations, base):
    """When serving, position p has read x[p+1] and the states up to p: nothing later counts."""
    drafter = random_drafter(6)
    tokens, states = conversations[0][0], conversations[1][0]
    index = base - (PROMPTS[0] - 1)
    before, drafts = run(drafter, [tokens], PROMPTS[:1], [states], "draft")
    other_tokens, other_states = tokens.clone(), states.clone()
    other_tokens[base + 2 :] = (other_tokens[base + 2 :] + 7) % 300
    other_states[base + 1 :] += 1.0
    after, other_drafts = run(drafter, [other_tokens], PROMPTS[:1], [other_states], "draft")
    assert torch.equal(drafts[: index + 1], other_drafts[: index + 1])
    same(after[: index + 1], before[: index + 1])
    # ... and the test would see it: what is read at p does change the outputs at p.
    other_states[base] += 1.0
    changed, _ = run(drafter, [other_tokens], PROMPTS[:1], [other_states], "draft")
    assert (changed[index] - before[index]).abs().max() > 1e-2
    same(changed[:index], before[:index])


@pytest.mark.parametrize("step", range(STEPS))
def test_truth_feeds_each_step_its_own_token(random_drafter, conversations, step):
    """x[p+1+j] enters at step j: another token there changes steps j, j+1, ... and none before."""
    drafter = random_drafter(6)
    tokens, states = conversations[0][1], conversations[1][1]
    base, other = PROMPTS[1] - 1, tokens.clone()
    other[base + 1 + step] = (other[base + 1 + step] + 7) % 300
    before, _ = run(drafter, [tokens], PROMPTS[1:2], [states], "truth")
    after, _ = run(drafter, [other], PROMPTS[1:2], [states], "truth")
    same(after[0, :step], before[0, :step])
    for later in range(step, STEPS):
        assert (after[0, later] - before[0, later]).abs().max() > 1e-2


def test_bfloat16_keeps_the_rotary_frequencies(random_drafter):
    """``.to(bfloat16)`` used to round the frequencies too: far positions turned by radians."""
    drafter = random_drafter(rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    x, far = torch.randn(1, 4, 16), torch.tensor([5000])
    exact = turn_halves(x, drafter.turn(far, x.dtype))
    small = x.to(torch.bfloat16)
    rounded = turn_halves(small, drafter.to(torch.bfloat16).turn(far, small.dtype))
    torch.testing.assert_close(rounded.float(), exact, atol=0.05, rtol=0.02)
