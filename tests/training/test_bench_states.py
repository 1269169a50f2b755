"""The bench of storage formats compares what it says: equal arms lose nothing, sizes are files'."""

import pytest

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import TrainParams
from eagle3lib.target.states import StateStore
from eagle3lib.target.storage_bench import median_line, read_rounds
from eagle3lib.training.bench_states import loss_rows, make_arms, size_rows, train_arms


@pytest.fixture(scope="module")
def arms(tiny_states, tmp_path_factory):
    return make_arms(StateStore(tiny_states), ["compact"], tmp_path_factory.mktemp("arms"))


def test_arms_hold_the_same_conversations_in_fewer_bytes(arms):
    full, compact = size_rows(arms, 64)
    assert (full["format"], compact["format"]) == ("full", "compact")
    assert full["tokens"] == compact["tokens"] > 0
    for name, line in (("full", full), ("compact", compact)):
        assert line["bytes_per_token"] * line["tokens"] == pytest.approx(arms[name].stored_bytes)
    assert compact["bytes_per_token"] < 0.5 * full["bytes_per_token"]


def test_only_exact_states_are_compared_with(arms, tmp_path):
    with pytest.raises(UserError, match=r"(?s)stored as compact.*state_format=full"):
        make_arms(arms["compact"], ["fp8"], tmp_path)


def test_every_format_is_trained_with_every_seed_and_full_loses_nothing(
    arms, tiny_vocab, tiny_target, tmp_path
):
    cfg = TrainParams(target=str(tiny_target.folder), epochs=2, steps=2, precision="float32")
    lines = train_arms(arms, tiny_vocab, tiny_target, cfg, 2, tmp_path)
    assert [(x["seed"], x["format"]) for x in lines if x["set"] == "workload"] == [
        (0, "full"), (0, "compact"), (1, "full"), (1, "compact"),
    ]  # fmt: skip
    again = train_arms(arms, tiny_vocab, tiny_target, cfg, 2, tmp_path)
    assert again == lines, "a finished training is not made again"
    for line in loss_rows(lines):
        if line["format"] == "full":
            assert line["lost"] == line["least_of_a_seed"] == line["most_of_a_seed"] == 0


def test_losses_are_pooled_over_seeds():
    def line(seed, name, rounds, accepted):
        return {"seed": seed, "format": name, "set": "w", "rounds": rounds, "accepted": accepted}

    lines = [line(0, "full", 100, 100), line(0, "fp8", 100, 80), line(1, "full", 300, 300),
             line(1, "fp8", 300, 300)]  # fmt: skip
    full, fp8 = loss_rows(lines)
    assert (full["acceptance_length"], full["lost"]) == (2.0, 0.0)
    assert fp8["acceptance_length"] == pytest.approx(1.95)
    assert (fp8["lost"], fp8["least_of_a_seed"], fp8["most_of_a_seed"]) == pytest.approx(
        (0.025, 0.0, 0.1)
    )


@pytest.mark.parametrize("cold", [False, True])
def test_reading_is_timed_in_every_order(arms, cold):
    lines = read_rounds(arms["compact"], rounds=3, cold=cold)
    assert len(lines) == 3
    middle = median_line(lines)
    assert (middle["format"], middle["cold"]) == ("compact", cold)
    for line in lines:
        assert line["ratio"] == pytest.approx(
            line["shuffled_mb_per_s"] / line["stored_mb_per_s"], rel=1e-6
        )
        assert line["files_mb_per_s"] > 0
    assert sorted(x["ratio"] for x in lines)[1] == middle["ratio"]
