"""What a format stores comes back within its stated error, of exactly the stated size."""

import itertools
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lib.drafter.align import base_positions, base_span, teacher_index
from eagle3lib.lab.errors import UserError
from eagle3lib.target.capture import capture
from eagle3lib.target.states import (
    StateEntry,
    StateStore,
    captured_row,
    check_shards,
    first_taught,
    ids_hash,
    mean_square,
)
from eagle3lib.target.storage import _packed, _unpacked, decode, encode, tensor_names
from eagle3lib.target.storage_bytes import (
    FORMATS,
    GROUP,
    LAST_BITS,
    SLOT_BITS,
    bytes_per_token,
)
from eagle3lib.target.storage_convert import convert_states, export_speculators

PARTS = ("hidden_states", "last")
LOSSY = ("fp8", "compact")


def states(seed=0, shape=(7, 3, 64), outlier=3000.0):
    """Heavy-tailed numbers with one outlier dimension, as a first token's state has."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    made[0, ..., 5] = outlier
    return made


def bound(x, state_format, part):
    """The largest error of each number that the docstring of ``storage`` allows."""
    if state_format == "fp8":
        amax = x.abs().amax(-1, keepdim=True)
        return torch.maximum(x.abs() / 16, amax / 2**18)
    most = 2 ** ({"hidden_states": SLOT_BITS, "last": LAST_BITS}[part] - 1) - 1
    scale = (x.unflatten(-1, (-1, GROUP)).abs().amax(-1) / most).bfloat16().float()
    return (scale / 2).repeat_interleave(GROUP, dim=-1)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_is_exact(part, dtype):
    x = states().to(dtype)
    assert torch.equal(decode(encode(x, "full", part), "full", part, dtype), x)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("state_format", LOSSY)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_error_is_within_its_bound(state_format, part, scale):
    for seed in range(5):
        x = states(seed) * scale
        found = decode(encode(x, state_format, part), state_format, part, torch.float32)
        # Half a unit of fp32 in the product and in the quotient, besides.
        allowed = bound(x, state_format, part) * (1 + 1e-5) + x.abs() * 1e-6
        assert ((found - x).abs() <= allowed).all()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("state_format", LOSSY)
def test_decoding_again_changes_nothing(state_format, part):
    """Stored, read, and stored again: a state moves once, not at each conversion."""
    x = states()
    once = decode(encode(x, state_format, part), state_format, part, torch.float32)
    twice = decode(encode(once, state_format, part), state_format, part, torch.float32)
    torch.testing.assert_close(
        twice, once, rtol=1e-2 if state_format == "compact" else 1e-6, atol=0
    )


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("state_format", FORMATS)
def test_zeros_and_signs_are_kept(state_format, part):
    x = states(outlier=0.5)
    x[2] = 0
    found = decode(encode(x, state_format, part), state_format, part, torch.float32)
    assert not found[2].any()
    assert ((found * x) >= 0).all()
    minus = decode(encode(-x, state_format, part), state_format, part, torch.float32)
    assert torch.equal(minus, -found)


@pytest.mark.parametrize("state_format", FORMATS)
def test_rows_are_stored_apart(state_format):
    """Reading some tokens gives what reading all gives: no scale is shared between tokens."""
    x = states()
    stored = encode(x, state_format, "hidden_states")
    assert set(stored) == set(tensor_names(state_format, "hidden_states"))
    some = {name: tensor[2:5] for name, tensor in stored.items()}
    whole = decode(stored, state_format, "hidden_states", torch.float32)
    assert torch.equal(decode(some, state_format, "hidden_states", torch.float32), whole[2:5])


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_packed_numbers_come_back_at_every_place(bits):
    """Every level beside every other, at each place of a word; no bit is spent on nothing."""
    most = 2 ** (bits - 1) - 1
    levels = torch.arange(-most, most + 1, dtype=torch.int32)
    pairs = torch.cartesian_prod(levels, levels).flatten()
    for shift in range(4):
        whole = pairs.roll(shift)[: len(pairs) // 4 * 4].view(-1, 4)
        packed = _packed(whole, bits)
        assert packed.numel() == whole.numel() * bits // 8
        assert torch.equal(_unpacked(packed, bits), whole)


def test_packed_bytes_are_as_documented():
    """The file's contract: 2^(bits - 1) added, the first number in the lowest bits."""
    whole = torch.tensor([[1, -31, 0, 31]], dtype=torch.int32)
    word = 33 | 1 << 6 | 32 << 12 | 63 << 18
    assert _packed(whole, 6).tolist() == [list(word.to_bytes(3, "little"))]
    assert _packed(whole[:, :1], 8).tolist() == [[129]]


@pytest.mark.parametrize("prompt_tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("answer_tokens", [1, 2, 3, 9])
def test_no_label_comes_from_a_last_state_that_is_not_stored(prompt_tokens, answer_tokens):
    """The law that lets the last states of a prompt go: every teacher's position is stored, at
    every step, and so is the one that predicts the first answer token (teacher agreement)."""
    total = prompt_tokens + answer_tokens
    span = base_span(max(prompt_tokens, 1), total)
    first = first_taught(prompt_tokens)
    for step in range(8):
        index = teacher_index(base_positions(span), step)
        assert (index > first).all()
    assert first == max(prompt_tokens - 1, 0)


@pytest.fixture(scope="module", params=FORMATS)
def stored(request, tiny_target, tiny_rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "states"
    capture(tiny_target, tiny_rows, folder, slots=(2, 5, 7), dtype="float32", batch_tokens=64,
            shard_rows=5, state_format=request.param)  # fmt: skip
    return StateStore(folder)


@pytest.fixture(scope="module")
def whole(tiny_states):
    return StateStore(tiny_states)


def test_every_format_gives_the_same_rows(stored, whole, tiny_rows):
    assert stored.state_format in FORMATS
    texts = {r.id: r.prompt_token_ids + r.answer_token_ids for r in tiny_rows}
    for entry, exact in zip(stored.entries, whole.rows(whole.entries), strict=True):
        row = stored.row(entry)
        assert entry.id == exact.entry.id
        assert row.token_ids.tolist() == texts[entry.id]
        assert row.slots.dtype == row.last.dtype == torch.float32
        x = exact.slots.unflatten(1, (3, -1))
        first = entry.first_taught
        assert not row.last[:first].any()
        found = row.slots.unflatten(1, (3, -1)), row.last[first:]
        for part, a, b in zip(PARTS, found, (x, exact.last[first:]), strict=True):
            if stored.state_format == "full":
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)
            else:
                allowed = bound(b, stored.state_format, part)
                assert ((a - b).abs() <= 1.01 * allowed + 1e-3).all()


def test_a_shard_is_as_large_as_planned(stored):
    """The plan's arithmetic is the file's: tensors without the header and the 8 bytes of an id."""
    tokens = sum(e.tokens for e in stored.entries)
    taught = sum(e.tokens - e.first_taught for e in stored.entries)
    numbers = 0
    for shard in stored.shards:
        for name, tensor in load_file(stored.folder / shard).items():
            numbers += 0 if name == "token_ids" else tensor.nbytes
    planned = bytes_per_token(64, stored.state_format, answer_share=taught / tokens, number_bytes=4)
    assert numbers == pytest.approx(planned * tokens)


def test_the_goal_of_042_of_four_whole_states():
    """At 60 % answer tokens and below, on SmolLM2's size and on Kimi-K2.5's."""
    for hidden, share in itertools.product((576, 7168), (0.4, 0.5, 0.6)):
        four = 4 * hidden * 2
        sizes = [bytes_per_token(hidden, name, answer_share=share) / four for name in FORMATS]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-1] <= 0.42
        assert bytes_per_token(hidden, "full") == four
    with pytest.raises(ValueError, match="bf17"):
        bytes_per_token(576, "bf17")


def test_a_cut_row_is_the_beginning_of_the_whole(stored):
    """A trainer may cut conversations: also within the prompt, where no last state is stored."""
    for entry in stored.entries[1:4]:
        row = stored.row(entry)
        for tokens in (1, entry.prompt_tokens - 1, entry.prompt_tokens + 2):
            cut = stored.row(replace(entry, tokens=tokens))
            assert torch.equal(cut.token_ids, row.token_ids[:tokens])
            assert torch.equal(cut.slots, row.slots[:tokens])
            assert torch.equal(cut.last, row.last[:tokens])


def test_token_ids_without_states(stored):
    for entry in stored.entries:
        assert torch.equal(stored.token_ids(entry), stored.row(entry).token_ids)


def test_a_format_that_cannot_hold_the_states_is_refused_before_the_target_is_loaded(
    tiny_target, tiny_rows, tmp_path
):
    odd = replace(tiny_target, config=tiny_target.config | {"hidden_size": 70})
    where = {"slots": (2, 5, 7), "dtype": "float32", "batch_tokens": 64, "shard_rows": 5}
    with pytest.raises(UserError, match=r"(?s)70 numbers.*state_format: fp8"):
        capture(odd, tiny_rows, tmp_path, state_format="compact", **where)
    with pytest.raises(UserError, match="no storage format 'int3'"):
        capture(tiny_target, tiny_rows, tmp_path, state_format="int3", **where)


def test_another_format_makes_the_shards_again(tiny_target, tiny_rows, tmp_path):
    where = {"slots": (2, 5, 7), "dtype": "float32", "batch_tokens": 64, "shard_rows": 5}
    capture(tiny_target, tiny_rows, tmp_path, **where)
    again = capture(tiny_target, tiny_rows, tmp_path, state_format="fp8", **where)
    assert again.captured_tokens == again.tokens
    assert StateStore(tmp_path).row(StateStore(tmp_path).entries[0]).last.any()


# Faults


@pytest.fixture
def copy(tiny_states, tmp_path):
    return shutil.copytree(tiny_states, tmp_path / "copy")


def test_a_shard_cut_short_is_named_at_once(copy):
    """A killed copy used to be found in the middle of a training, at its first row."""
    path = sorted(copy.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(UserError, match=rf"(?s)cut short.*of.*bytes.*{path.name}"):
        StateStore(copy)
    path.unlink()
    with pytest.raises(UserError, match=rf"(?s)missing.*{path.name}"):
        StateStore(copy)


def test_a_cut_shard_alone_is_captured_again(tiny_target, tiny_rows, copy):
    path = sorted(copy.glob("*.safetensors"))[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    result = capture(tiny_target, tiny_rows, copy, slots=(2, 5, 7), dtype="float32",
                     batch_tokens=64, shard_rows=5)  # fmt: skip
    assert path.read_bytes() == whole
    assert 0 < result.captured_tokens < result.tokens
    assert check_shards(StateStore(copy)) == []


def test_one_changed_byte_is_found(copy):
    path = sorted(copy.glob("*.safetensors"))[0]
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(bytes(raw))
    store = StateStore(copy)
    found = check_shards(store)
    assert [(f.code, f.severity) for f in found] == [("shard-contents", "error")]
    assert found[0].where.endswith(path.name)
    assert check_shards(store, contents=False) == []


def test_swapped_conversations_are_named(copy):
    """Two conversations of one length in each other's place: sizes and shapes all fit."""
    entry = StateStore(copy).entries[0]
    tensors = load_file(copy / entry.shard)
    here, there = (slice(s, s + entry.tokens) for s in (entry.start, entry.start + entry.tokens))
    for tensor in (tensors["token_ids"], tensors["hidden_states"]):
        tensor[here], tensor[there] = tensor[there].clone(), tensor[here].clone()
    save_file(tensors, copy / entry.shard)
    with pytest.raises(UserError, match=rf"other tokens where conversation {entry.id}"):
        StateStore(copy).row(entry)


def test_states_of_the_layout_before_are_refused(copy):
    index = json.loads((copy / "index.json").read_text())
    del index["layout"]
    (copy / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"(?s)layout 1.*layout 2.*eagle3 run"):
        StateStore(copy)


def test_hash_of_ids():
    assert ids_hash([1, 2, 3]) == ids_hash(torch.tensor([1, 2, 3]))
    assert len({ids_hash(ids) for ids in ([1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0], [])}) == 5


# Other shapes


@pytest.mark.parametrize("state_format", FORMATS)
def test_converted_states_are_those_of_a_capture_in_that_format(whole, tmp_path, state_format):
    made = convert_states(whole, tmp_path / state_format, state_format)
    assert made.state_format == state_format
    assert (made.slots, made.dtype) == (whole.slots, whole.dtype)
    assert [e.id for e in made.entries] == [e.id for e in whole.entries]
    for row, exact in zip(made.rows(made.entries), whole.rows(whole.entries), strict=True):
        x = exact.last[exact.entry.first_taught :]
        expected = decode(encode(x, state_format, "last"), state_format, "last", torch.float32)
        assert torch.equal(row.last[row.entry.first_taught :], expected)
        assert row.entry.mean_square == mean_square(exact)
    if state_format != "full":
        assert made.stored_bytes < 0.6 * whole.stored_bytes
    with pytest.raises(UserError, match="in place"):
        convert_states(made, made.folder, "full")


def test_export_in_the_layout_of_speculators(whole, tmp_path):
    chosen = whole.select(split="heldout")
    assert export_speculators(whole, tmp_path, chosen) == len(chosen) == 3
    facts = json.loads((tmp_path / "conversations.json").read_text())
    assert "pre" not in facts and facts["slots"] == [2, 5, 7]
    for number, entry in enumerate(chosen):
        file = load_file(tmp_path / f"hs_{number}.safetensors")
        row = whole.row(entry)
        assert set(file) == {"hidden_states", "token_ids"}
        assert file["hidden_states"].shape == (entry.tokens, 4, 64)
        assert torch.equal(file["hidden_states"][:, :3].flatten(1), row.slots)
        assert torch.equal(file["hidden_states"][:, 3], row.last)
        assert torch.equal(file["token_ids"], row.token_ids)
        assert facts["conversations"][number]["id"] == entry.id


def test_mean_square_of_a_long_conversation():
    """12 million numbers: one fp32 sum of their squares is 0.7 % short."""
    states = torch.randn(2000, 3, 2048, generator=torch.Generator().manual_seed(0))
    row = captured_row(
        StateEntry("a", "workload", "train", "", 0, 2000, 1, None), [0] * 2000, states
    )
    exact = float(states.double().square().mean())
    assert mean_square(row) == pytest.approx(exact, rel=1e-5)
