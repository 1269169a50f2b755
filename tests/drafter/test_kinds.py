"""Both kinds of drafter and every option, against a second implementation and transformers."""

import pytest
import torch
from explicit import Explicit
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from eagle3lib.drafter.attention import chain_attention
from eagle3lib.drafter.config import MLA, OPTIONS, DrafterConfig
from eagle3lib.drafter.layers import MLAAttention, mla_scale
from eagle3lib.drafter.model import Drafter, PackedRows, unroll
from eagle3lib.lab.errors import UserError

STEPS = 4
LENGTHS, PROMPTS = [9, 14, 6], [3, 7, 2]
SIZES = MLA(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "beta_fast": 4, "beta_slow": 1,
    "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.6,
}  # fmt: skip
MLA_TYPE = {"mla": SIZES, "head_dim": 20, "num_key_value_heads": 4}
LATENT = MLA_TYPE | {"rope_parameters": YARN}
NO_RANK = MLA(None, 20, 12, 8, 10)
DRAFTERS = {
    "plain": {},
    "one slot": {"slots": (5,)},
    "five slots": {"slots": (1, 2, 5, 7, 9)},
    "narrower than the target": {"hidden_size": 48, "head_dim": 12},
    "llama yarn": {"rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k}},
    "llama yarn of an MLA target": {"rope_parameters": YARN},
    **{name: {name: True} for name in OPTIONS},
    "fc_norm, five slots": {"fc_norm": True, "slots": (1, 2, 5, 7, 9)},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True},
    "speculators' defaults": dict.fromkeys(OPTIONS[1:], True),
    "all options": dict.fromkeys(OPTIONS, True),
    "mla": MLA_TYPE,
    "mla yarn": LATENT,
    "mla yarn, queries without rank": LATENT | {"mla": NO_RANK},
    "mla EAGLE 3.1": LATENT | {"fc_norm": True, "norm_output": True},
    "mla norm_before_residual": LATENT | {"norm_before_residual": True},
}  # fmt: skip


def conversations(drafter, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(5)
    width = len(drafter.config.slots) * drafter.config.target_hidden_size
    rows = [torch.randint(0, 300, (n,), generator=generator) for n in lengths]
    return rows, [torch.randn(n, width, generator=generator) for n in lengths]


def run(drafter, rows, prompts, states, steps=STEPS):
    with torch.no_grad():
        made = unroll(
            drafter, PackedRows.pack(rows, prompts), torch.cat(states), steps, feed="truth"
        )
    return torch.stack([step.hidden for step in made], dim=1)  # [P, K, H]


@pytest.mark.parametrize("changes", DRAFTERS.values(), ids=DRAFTERS)
def test_every_kind_is_the_explicit_drafter(random_drafter, changes):
    """Steps 0 to 3 at every base position, states and logits."""
    drafter = random_drafter(7, draft_vocab_size=120, **changes)
    rows, states = conversations(drafter)
    found = run(drafter, rows, PROMPTS, states)
    explicit = Explicit(drafter)
    expected = torch.cat([
        explicit.run(tokens, state, STEPS)[n - 1 : len(tokens) - 2]
        for tokens, state, n in zip(rows, states, PROMPTS, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=2e-4)
    with torch.no_grad():
        logits = drafter.logits(found.flatten(0, 1)).double()
    torch.testing.assert_close(
        logits, explicit.logits(expected.flatten(0, 1)), atol=2e-4, rtol=2e-4
    )


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", [{}, MLA_TYPE], ids=["llama", "mla"])
def test_no_option_is_without_effect(random_drafter, option, kind):
    """vLLM #43482: an MLA drafter's fc_norm was made, loaded, and never applied."""
    plain, other = (random_drafter(7, **kind, **options) for options in ({}, {option: True}))
    shared = {k: v for k, v in plain.state_dict().items() if k in other.state_dict()}
    other.load_state_dict(shared, strict=False)
    rows, states = conversations(plain)
    before, after = (run(d, rows, PROMPTS, states) for d in (plain, other))
    first = 1 if option == "norm_output" else 0  # what is fed back is read from step 1 on
    for step in range(first, STEPS):
        assert (before[:, step] - after[:, step]).abs().max() > 1e-2
    assert torch.equal(before[:, :first], after[:, :first])


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("kind", [{}, MLA_TYPE], ids=["llama", "mla"])
def test_the_head_reads_the_normed_state_and_the_next_step_what_the_option_says(
    random_drafter, kind, norm_output
):
    """SpecForge #879: with norm_output off the head read the un-normed state too, and with it on
    the next step still read the un-normed one. The head's input is normed either way; the state
    that enters step 1 is un-normed without, normed with the option."""
    drafter = random_drafter(7, norm_output=norm_output, **kind)
    rows, states = conversations(drafter)
    entered, read = [], []
    drafter.midlayer.hidden_norm.register_forward_pre_hook(lambda _, x: entered.append(x[0]))
    drafter.lm_head.register_forward_pre_hook(lambda _, x: read.append(x[0]))
    with torch.no_grad():
        made = unroll(drafter, PackedRows.pack(rows, PROMPTS), torch.cat(states), 2, feed="draft")
        normed = drafter.norm(made[0].hidden)
    assert torch.equal(read[0], normed)
    assert torch.equal(entered[2], normed if norm_output else made[0].hidden)
    assert (normed - made[0].hidden).abs().max() > 0.1, "the test would see no difference"


def latent_attention(c):
    """DeepSeek's attention of transformers, 2H wide, without its output projection."""
    config = DeepseekV3Config(
        hidden_size=2 * c.hidden_size, num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_attention_heads, q_lora_rank=c.mla.q_lora_rank,
        kv_lora_rank=c.mla.kv_lora_rank, qk_nope_head_dim=c.mla.qk_nope_head_dim,
        qk_rope_head_dim=c.mla.qk_rope_head_dim, v_head_dim=c.mla.v_head_dim,
        max_position_embeddings=256, rope_parameters=dict(c.rope_parameters), rope_interleave=True,
        attn_implementation="eager",
    )  # fmt: skip
    return DeepseekV3Attention(config, 0), DeepseekV3RotaryEmbedding(config)


def grouped_attention(c):
    config = LlamaConfig(
        hidden_size=2 * c.hidden_size, num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim,
        max_position_embeddings=256, rope_parameters=dict(c.rope_parameters),
        attn_implementation="eager",
    )  # fmt: skip
    return LlamaAttention(config, 0), LlamaRotaryEmbedding(config)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [MLA_TYPE, LATENT, LATENT | {"mla": NO_RANK}, {}, {"rope_parameters": LLAMA3},
     {"rope_parameters": YARN}],
    ids=["mla", "mla yarn", "mla without rank", "llama", "llama3", "llama yarn"],
)  # fmt: skip
def test_attention_is_that_of_transformers(random_drafter, changes):
    """Step 0 on the same weights: rotary layout, frequencies, softmax scale, head widths."""
    drafter = random_drafter(9, rms_norm_eps=1e-6, **changes)
    c, own = drafter.config, drafter.midlayer.self_attn
    attention, rotary = (latent_attention if c.mla else grouped_attention)(c)
    attention.o_proj = torch.nn.Identity()
    attention.load_state_dict({k: v for k, v in own.state_dict().items() if "o_proj" not in k})
    length = 40  # beyond original_max_position_embeddings
    mixed = torch.randn(length, 2 * c.hidden_size, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length)
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected, _ = attention(
            mixed[None], position_embeddings=rotary(mixed[None], positions[None]),
            attention_mask=mask,
        )  # fmt: skip
        rows = PackedRows.pack([torch.zeros(length, dtype=torch.int64)], [1])
        turn = drafter.turn(positions, mixed.dtype)
        keys, values = own.keys_values(mixed, turn)
        attend = chain_attention(own.scale, rows, keys, values)
        base = rows.base
        found = attend(own.queries(mixed, turn)[base], keys[base], values[base], 0)
    torch.testing.assert_close(found, expected[0, base], atol=1e-5, rtol=1e-5)


def test_yarn_factor_enters_the_softmax_scale_squared(random_drafter):
    """A trainer that forgot it: Kimi's factor 64 makes scores 1.9 to 2.0 times as large."""
    plain = random_drafter(**MLA_TYPE).config
    kimi = YARN | {"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn = random_drafter(**(MLA_TYPE | {"rope_parameters": kimi})).config
    assert mla_scale(plain) == pytest.approx(20**-0.5)
    assert mla_scale(yarn) / mla_scale(plain) == pytest.approx(1.41589**2, rel=1e-4)


def mla_target(**changes):
    return {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "vocab_size": 300, "num_hidden_layers": 10,
        "rope_theta": 100.0, "max_position_embeddings": 256, "q_lora_rank": 24, "kv_lora_rank": 20,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "head_dim": 8,
        "rope_scaling": {k: v for k, v in YARN.items() if not k.startswith("rope")}
        | {"type": "yarn"},
    } | changes  # fmt: skip


def test_for_target_takes_the_targets_kind():
    c = DrafterConfig.for_target(mla_target(), 120, fc_norm=True)
    assert (c.kind, c.mla, c.head_dim, c.num_key_value_heads) == ("mla", SIZES, 20, 4)
    assert c.rope_parameters == YARN
    assert c.options == ["fc_norm"]
    assert isinstance(Drafter(c).midlayer.self_attn, MLAAttention)


def test_for_target_makes_a_llama_type_of_an_mla_target():
    c = DrafterConfig.for_target(mla_target(), 120, kind="llama", slots=(1, 9))
    assert (c.kind, c.head_dim, c.num_key_value_heads, c.slots) == ("llama", 10, 4, (1, 9))


@pytest.mark.parametrize(("asked", "made"), [(0, 96), (40, 40)])
def test_the_mlp_is_as_wide_as_asked_or_as_the_targets(asked, made):
    c = DrafterConfig.for_target(mla_target(), 120, intermediate_size=asked)
    assert Drafter(c).midlayer.mlp.gate_proj.weight.shape == (made, 64)
    assert c.as_hf_config("float32")["intermediate_size"] == made


def test_for_target_makes_no_mla_of_a_target_without_latent_attention(tiny_target):
    with pytest.raises(UserError, match="latent attention"):
        DrafterConfig.for_target(tiny_target.config, 120, kind="mla")


@pytest.mark.parametrize("changes", [{}, MLA_TYPE, LATENT | {"mla": NO_RANK}])
def test_layer_parameters_are_counted(random_drafter, changes):
    drafter = random_drafter(**changes)
    matrices = [p.numel() for p in drafter.midlayer.parameters() if p.ndim > 1]
    assert drafter.config.layer_parameters == sum(matrices)


@pytest.mark.parametrize("kind", [{}, LATENT], ids=["llama", "mla"])
def test_bfloat16_runs_and_gradients_reach_every_weight(random_drafter, kind):
    drafter = random_drafter(7, **dict.fromkeys(OPTIONS, True), **kind).to(torch.bfloat16)
    rows, states = conversations(drafter)
    made = unroll(
        drafter, PackedRows.pack(rows, PROMPTS), torch.cat(states).bfloat16(), 3, feed="truth"
    )
    drafter.logits(made[2].hidden).float().sum().backward()
    missing = [n for n, p in drafter.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


def test_unroll_takes_the_attention_that_it_is_given(random_drafter):
    """A faster implementation replaces the reference by its signature alone."""
    drafter, asked = random_drafter(7), []

    def other(scale, rows, keys, values):
        attend = chain_attention(scale, rows, keys, values)
        return lambda q, k, v, step: (asked.append((q.shape, step)), attend(q, k, v, step))[1]

    rows, states = conversations(drafter)
    packed = PackedRows.pack(rows, PROMPTS)
    with torch.no_grad():
        made = unroll(drafter, packed, torch.cat(states), 3, feed="truth", attention=other)
    assert asked == [((len(packed.base), 4, 16), step) for step in range(3)]
    assert torch.equal(made[2].hidden, run(drafter, rows, PROMPTS, states)[:, 2])


def test_rows_follow_the_states_device():
    rows = PackedRows.pack([torch.arange(6), torch.arange(5)], [2, 1])
    assert rows.to("cpu") is rows
    moved = rows.to("meta")
    assert {t.device.type for t in vars(moved).values()} == {"meta"}
