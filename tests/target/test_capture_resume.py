"""A capture that was stopped, or whose files are damaged, of something else or too large."""

import errno
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagle3lib.lab.errors import UserError
from eagle3lib.target.capture import InProcess, capture
from eagle3lib.target.forward import forward_states
from eagle3lib.target.states import StateStore

SLOTS = (2, 5, 7)
CAPTURE = {"slots": SLOTS, "dtype": "float32", "batch_tokens": 64, "shard_rows": 5}


def test_interrupted_capture_goes_on(tiny_target, tiny_rows, tmp_path, monkeypatch):
    capture(tiny_target, tiny_rows, tmp_path, **CAPTURE)
    shards = sorted(tmp_path.glob("shard-*.safetensors"))
    assert len(shards) == 3
    before = {path.name: load_file(path) for path in shards}
    index = json.loads((tmp_path / "index.json").read_text())
    kept_at = shards[0].stat().st_mtime_ns

    (tmp_path / "index.json").unlink()
    shards[-1].unlink()
    made = []

    def counted(model, rows, *rest):
        made.extend(rows)
        return forward_states(model, rows, *rest)

    monkeypatch.setattr("eagle3lib.target.capture.forward_states", counted)
    result = capture(tiny_target, tiny_rows, tmp_path, **CAPTURE)

    assert len(made) == len(tiny_rows) - 2 * 5, "whole shards are not made again"
    assert shards[0].stat().st_mtime_ns == kept_at
    assert result.conversations == len(tiny_rows)
    assert json.loads((tmp_path / "index.json").read_text()) == index
    for path in shards:
        again = load_file(path)
        for name, tensor in before[path.name].items():
            assert torch.equal(again[name], tensor)


def test_shards_of_other_rows_are_made_again(tiny_target, tiny_rows, tmp_path):
    capture(tiny_target, tiny_rows[:6], tmp_path, **CAPTURE)
    capture(tiny_target, tiny_rows, tmp_path, **CAPTURE)
    store = StateStore(tmp_path)
    assert len(store.entries) == len(tiny_rows)
    for row in store.rows(store.entries):
        wanted = next(r for r in tiny_rows if r.id == row.entry.id)
        assert row.token_ids.tolist() == wanted.prompt_token_ids + wanted.answer_token_ids


@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_a_damaged_shard_is_made_again(tiny_target, tiny_rows, tmp_path, damage):
    """Its side file says it is there; the size of the shard tells."""
    capture(tiny_target, tiny_rows, tmp_path, **CAPTURE)
    path = tmp_path / "shard-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-64] if damage == "cut" else b"")
    again = capture(tiny_target, tiny_rows, tmp_path, **CAPTURE)
    assert 0 < again.captured_tokens < again.tokens
    assert path.read_bytes() == whole


@pytest.mark.parametrize("changed", [{"slots": (1, 5, 7)}, {"dtype": "bfloat16"}])
def test_shards_made_of_something_else_are_not_mixed(tiny_target, tiny_rows, tmp_path, changed):
    capture(tiny_target, tiny_rows, tmp_path, **CAPTURE)
    (tmp_path / "index.json").unlink()
    with pytest.raises(UserError, match=rf"(?s){next(iter(changed))}: .* now.*capture\.json"):
        capture(tiny_target, tiny_rows, tmp_path, **(CAPTURE | changed))


def test_a_changed_target_is_named(tiny_target, tiny_rows, tmp_path):
    capture(tiny_target, tiny_rows[:6], tmp_path, **CAPTURE)
    other = replace(tiny_target, fingerprint="0123456789abcdef")
    with pytest.raises(UserError, match=rf"target: {tiny_target.fingerprint} there, 0123"):
        capture(other, tiny_rows, tmp_path, **CAPTURE)


def test_leftovers_are_cleared(tiny_target, tiny_rows, tmp_path):
    """A killed write's temporary file, and shards of a larger set of rows."""
    capture(tiny_target, tiny_rows, tmp_path, **CAPTURE)
    (tmp_path / ".shard-00001.safetensors.77.tmp").write_bytes(b"half")
    capture(tiny_target, tiny_rows[:4], tmp_path, **CAPTURE)
    names = {"capture.json", "index.json", "shard-00000.json", "shard-00000.safetensors"}
    assert {p.name for p in tmp_path.iterdir()} == names


def test_a_disk_too_small_is_told_before(tiny_target, tiny_rows, tmp_path, monkeypatch):
    """What is there already needs no room again."""
    capture(tiny_target, tiny_rows, tmp_path, **CAPTURE)
    full = SimpleNamespace(f_bavail=256 * 2**20 + 100, f_frsize=1)
    monkeypatch.setattr("eagle3lib.target.capture.os.statvfs", lambda folder: full)
    capture(tiny_target, tiny_rows, tmp_path, **CAPTURE)
    with pytest.raises(UserError, match=r"(?s)0\.3 GB are free.*finished shards are kept"):
        capture(tiny_target, tiny_rows, tmp_path / "more", **CAPTURE)
    assert not list((tmp_path / "more").glob("shard-*"))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_up_keeps_finished_shards(
    tiny_target, tiny_rows, tmp_path, monkeypatch, error
):
    written = []

    def write(tensors, path):
        if written:
            raise error
        written.append(path)
        save_file(tensors, path)

    monkeypatch.setattr("eagle3lib.target.states.save_file", write)
    with pytest.raises(UserError, match=r"(?s)disk is full.*finished shards are kept"):
        capture(tiny_target, tiny_rows, tmp_path, **CAPTURE)
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["shard-00000.safetensors"]
    assert not list(tmp_path.glob(".*tmp"))
    monkeypatch.undo()
    result = capture(tiny_target, tiny_rows, tmp_path, **CAPTURE)
    assert 0 < result.captured_tokens < result.tokens


def test_a_source_that_gives_too_few_states_is_refused(tiny_target, tiny_rows, tmp_path):
    """vllm#44485: of a prompt found in the prefix cache only the rest came back."""

    class Short(InProcess):
        def states(self, rows):
            return [made[1:] for made in super().states(rows)]

    source = Short(tiny_target, SLOTS, "float32", 64)
    with pytest.raises(UserError, match=r"\d+ states for \d+ tokens"):
        capture(tiny_target, tiny_rows, tmp_path, source=source, **CAPTURE)
    assert source.model is None, "the source is closed"
