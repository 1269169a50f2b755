"""The peer's files, its log, and that both trainers get the same rows."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file

from eagle3lib.drafter.vocab import VocabMap, check_vocab_map
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.params import TrainParams
from eagle3lib.target.states import StateStore
from eagle3lib.training import peer

LOGS = Path(__file__).parent / "peer_logs"
LOCK = (ROOT / "requirements" / "peer.txt").read_text()


@pytest.fixture(scope="module")
def store(tiny_states):
    return StateStore(tiny_states)


@pytest.fixture(scope="module")
def rows(store):
    return peer.choose_rows(store, tokens=10**6, heldout=2)


def test_rows_fill_the_budget_and_a_smaller_choice_begins_a_larger_one(store, rows):
    some = peer.choose_rows(store, tokens=rows.tokens // 2)
    assert some.train == rows.train[: len(some.train)]
    assert some.tokens >= rows.tokens // 2 > some.tokens - some.train[-1].tokens
    assert len(rows.train) == 8  # the row whose answer has one token trains nobody
    assert {e.split for e in rows.train} == {"train"}
    assert {(e.split, e.set) for e in rows.heldout} == {("heldout", "workload")}


def test_the_peer_reads_back_what_was_captured(store, rows, tiny_vocab, tmp_path):
    vocab = VocabMap.load(tiny_vocab)
    table = peer.write_peer_rows(store, rows, vocab, tmp_path)
    for number, entry in enumerate((*rows.train, *rows.heldout)):
        captured = store.row(entry)
        file = load_file(tmp_path / "hidden_states" / f"hs_{number}.safetensors")
        assert torch.equal(file["hidden_states"][:, :-1].flatten(1), captured.slots)
        assert torch.equal(file["hidden_states"][:, -1], captured.last)
        assert file["token_ids"].tolist() == table[number]["input_ids"]
        assert table[number]["seq_len"] == len(table[number]["loss_mask"]) == entry.tokens
        masked = [i for i, m in enumerate(table[number]["loss_mask"]) if m]
        assert masked == list(range(entry.prompt_tokens, entry.tokens))
    maps = [torch.from_numpy(np.load(tmp_path / f"{name}-48.npy")) for name in ("d2t", "t2d")]
    assert check_vocab_map(*maps) == []
    assert torch.equal(maps[0], vocab.d2t)


def test_ours_reads_the_same_rows_out_of_the_runs_own_shards(store, rows, tiny_vocab, tmp_path):
    peer.write_own_rows(store, rows, VocabMap.load(tiny_vocab), tmp_path)
    mine = StateStore(tmp_path / "states")
    assert [e.id for e in mine.entries] == [e.id for e in (*rows.train, *rows.heldout)]
    for entry in mine.entries:
        whole = next(e for e in store.entries if e.id == entry.id)
        assert torch.equal(mine.row(entry).slots, store.row(whole).slots)


@pytest.mark.parametrize("train", [1, 2, 7, 99, 1000, 12345])
@pytest.mark.parametrize("heldout", [1, 4, 100])
def test_the_peers_split_by_position_falls_between_training_and_held_out(
    rows, tiny_target, train, heldout
):
    """int(rows * ratio) must be the number of training rows, whatever the rounding."""
    many = peer.BenchRows(rows.train[:1] * train, rows.heldout[:1] * heldout)
    settings = peer.PeerSettings(Path("python"), tiny_target, 48, steps=7, epochs=2)
    options = settings.options(Path("data"), many, Path("save"))
    ratio = float(options[options.index("--train-data-ratio") + 1])
    assert int((train + heldout) * ratio) == train


@pytest.mark.parametrize("columns", [80, 2000])
def test_updates_are_read_at_any_width_of_the_log(columns):
    """Captured from three updates of speculators 0.9.0; validation lines are no updates."""
    updates = peer.read_peer_log((LOGS / f"columns_{columns}.log").read_text())
    assert [u.step for u in updates] == [0, 1, 2]
    assert {u.epoch for u in updates} == {0}
    for update in updates:
        assert 400 < update.tokens <= 512
        assert 0.5 < update.seconds < 60


def test_other_tokens_than_asked_are_an_error(tmp_path):
    peer._check_tokens("ours", 1005, 1000, tmp_path)
    with pytest.raises(UserError, match="trained on 900 tokens"):
        peer._check_tokens("ours", 900, 1000, tmp_path)


def test_a_finished_training_is_kept_until_its_settings_change(tmp_path):
    made = []

    def run():
        (tmp_path / "job" / "left").write_text("")
        made.append(1)
        return peer.Trained("ours", 1, 100, 5, 2.0, 3.0, 2.5, None, 1)

    first = peer._once(tmp_path / "job", {"epochs": 1}, run)
    assert peer._once(tmp_path / "job", {"epochs": 1}, run) == first
    assert len(made) == 1 and first.tokens_per_s == 50
    peer._once(tmp_path / "job", {"epochs": 2}, run)
    assert len(made) == 2


def test_a_killed_training_goes_on_and_counts_what_was_spent(tmp_path):
    """The second process finds the first one's files; a peer's update made twice counts once."""
    code = "import sys, time, pathlib; p = pathlib.Path('left'); here = p.exists(); p.touch(); "
    code += "time.sleep(0.5); sys.exit(0 if here else 3)"

    def run():
        spent = peer._run([sys.executable, "-c", code], tmp_path / "job" / "log", {}, cwd=where)
        return peer.Trained("ours", 1, 100, 5, 2.0, threads=1, **spent)

    where = tmp_path / "job"
    peer.write_json(where / "pieces.json", [[2.0, 1.0, 10**12]])  # of other settings: forgotten
    with pytest.raises(UserError, match="exit code 3"):
        peer._once(where, {"epochs": 1}, run)
    [[wall_s, *_]] = peer.read_json(where / "pieces.json")
    assert 0.4 < wall_s < 60, "one that died by itself has taken its time, too"
    peer.write_json(where / "pieces.json", [[2.0, 1.0, 10**12]])  # as it would have written later
    done = peer._once(where, {"epochs": 1}, run)
    assert done.pieces == 2 and 2.5 < done.wall_s < 60 and done.cpu_s >= 1.0
    assert done.peak_rss_bytes == 10**12
    text = (LOGS / "columns_2000.log").read_text()
    assert peer.read_peer_log(text + text) == peer.read_peer_log(text)


def test_our_trainer_runs_as_a_child_and_sees_every_token(
    store, rows, tiny_vocab, tiny_target, tmp_path
):
    peer.write_own_rows(store, rows, VocabMap.load(tiny_vocab), tmp_path / "data")
    cfg = TrainParams(target=str(tiny_target.folder), epochs=2, steps=2, checkpoint_every=2)
    done = peer.train_own(tmp_path / "job", tmp_path / "data", rows, cfg, threads=1)
    assert done.tokens == 2 * rows.tokens
    assert 0 < done.seconds < done.wall_s
    assert done.cpu_s > 0 and done.peak_rss_bytes > 10**8
    again = peer.train_own(tmp_path / "job", tmp_path / "data", rows, cfg, threads=1)
    assert dataclasses.asdict(again) == dataclasses.asdict(done)


def test_a_peer_that_dies_shows_the_end_of_its_log(rows, tiny_target, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such option\nexit 3\n")
    python.chmod(0o755)
    settings = peer.PeerSettings(python, tiny_target, 48, steps=2, epochs=1)
    with pytest.raises(UserError, match=r"exit code 3\):\nno such option"):
        peer.train_peer(tmp_path / "job", tmp_path, rows, settings, threads=1)


def test_a_missing_peer_names_the_command(tmp_path):
    with pytest.raises(UserError, match="make peer"):
        peer.find_peer(tmp_path / "python")


def test_the_lock_pins_the_peer_and_leaves_out_what_brings_cuda():
    pins = {r.name: str(r.specifier) for r in map(Requirement, LOCK.split("\n")[:-1])}
    assert all(spec.startswith("==") for spec in pins.values())
    assert pins["speculators"] == pins["hs-connectors"] == "==0.9.0"
    assert pins["torch"] == "==2.13.0+cpu"
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(pins)
    assert not re.search(r"https?:|file:|--index|--find-links|@ ", LOCK)
