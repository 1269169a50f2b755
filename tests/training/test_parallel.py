"""Two processes are one: gradients, counts and losses are sums over ranks."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.params import TrainParams
from eagle3lib.target.states import StateStore
from eagle3lib.training.data import share_out
from eagle3lib.training.job import torchrun
from eagle3lib.training.loop import Trainer
from eagle3lib.training.parallel import Place


def assert_same_curve(one, two, on, within=1e-6):
    """Counts and rates are equal, and the fp32 weights at the end differ by rounding alone."""
    expected, found = on.rows_of(one, "train"), on.rows_of(two, "train")
    assert len(found) == len(expected)
    for a, b in zip(expected, found, strict=True):
        for key in ("update", "epoch", "tokens", "learning_rate"):
            assert a[key] == b[key]
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], abs=2e-4)
        for mine, theirs in zip(a["steps"], b["steps"], strict=True):
            assert [theirs[k] for k in ("positions", "inside")] == [
                mine[k] for k in ("positions", "inside")
            ]
            assert theirs["loss"] == pytest.approx(mine["loss"], abs=2e-4)
    assert [r["epoch"] for r in on.rows_of(two, "evaluation")] == [
        r["epoch"] for r in on.rows_of(one, "evaluation")
    ]
    a, b = on.weights(one), on.weights(two)
    for name in a:
        assert torch.allclose(a[name], b[name], atol=within, rtol=1e-5), name


# A small rate: the sums of two ranks round differently, and AdamW's first updates blow that up.
SMALL = {"epochs": 3, "learning_rate": 1e-5}


@pytest.mark.parametrize(
    "changes",
    [
        {"sharding": "none"},
        {"sharding": "fsdp", "recompute": True},
        {"sharding": "fsdp", "optimizer": "muon", "accumulate": 5},
    ],
    ids=["replicated", "fsdp", "fsdp, muon, and parts without rows"],
)
def test_two_processes_are_one(train, folders, params, tiny_target, changes, on):
    """With five parts a rank of eight conversations some parts are empty."""
    optimizer = {"optimizer": changes.get("optimizer", "adamw")}
    one, two = train("one", **SMALL, **optimizer), folders("two")
    on.run_ranks(params(**SMALL, **changes), tiny_target, two, 2)
    assert_same_curve(one, two, on, within=1e-5 if "optimizer" in changes else 1e-6)


def test_two_processes_share_one_long_conversation(
    train, folders, params, tiny_target, on, monkeypatch
):
    """An update of one conversation: each rank has a stretch of its base positions."""
    changes = SMALL | {"batch_tokens": 1}
    one, two = train("one", **changes), folders("two")
    monkeypatch.setattr("eagle3lib.training.data.STRETCH", 3)
    longest = max(StateStore(folders().states).select(split="train"), key=lambda e: e.tokens)
    assert all(share_out([longest], 2, params().steps)), "both have some of it"
    on.run_ranks(params(**changes), tiny_target, two, 2)
    assert_same_curve(one, two, on)


def test_torchrun_starts_them(train, folders, command, on):
    changes = SMALL | {"epochs": 1}
    one, two = train("one", **changes), folders("two")
    on.run_child(command(two, **changes, processes=2))
    assert_same_curve(one, two, on)


def test_a_run_goes_on_with_another_number_of_processes(train, folders, command, params, on,
                                                        tiny_target):  # fmt: skip
    """From one process to two sharded ones: checkpoints hold whole tensors."""
    one, two = train("one", **SMALL), folders("two")

    class Half(Trainer):
        def _judge(self):
            super()._judge()
            if self.at.epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Half(params(**SMALL), tiny_target, two).run()
    on.run_ranks(params(**SMALL, sharding="fsdp"), tiny_target, two, 2)
    assert read_json(two.last / "state.json")["update"] == 6
    assert_same_curve(one, two, on)
    a, b = (load_file(f.last / "optimizer.safetensors") for f in (one, two))
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], atol=1e-5), name


def test_one_process_has_nothing_to_shard(params, folders, tiny_target):
    with pytest.raises(UserError, match="fsdp with one process"):
        Trainer(params(sharding="fsdp"), tiny_target, folders())


def test_a_place_without_torchrun(monkeypatch):
    assert not dist.is_initialized()
    place = Place.open("cpu")
    assert (place.device.type, place.rank, place.world) == ("cpu", 0, 1)
    assert place.sum([1.5, 2.0]) == [1.5, 2.0]


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="torch sees no GPU"):
        Place.open("cuda")
    assert Place.open("auto").device.type == "cpu"


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=r"(?s)process 2 .*at most 2"):
        Place.open("auto")


def test_nodes_get_their_own_command(params):
    """Each differs in its rank alone, and meets at the address of the first."""
    cfg = params(nodes=3, rendezvous="10.0.0.1:29500", processes=8)
    lines = [torchrun(cfg, node, "job.json") for node in range(3)]
    assert {len(line) for line in lines} == {len(lines[0])}
    different = [set(values) for values in zip(*lines, strict=True) if len(set(values)) > 1]
    assert different == [{"0", "1", "2"}]
    assert lines[0][lines[0].index("--master-addr") + 1] == "10.0.0.1"
    assert lines[0][lines[0].index("--nproc-per-node") + 1] == "8"
    assert "--standalone" in torchrun(params(), 0, "job.json")


def test_nodes_need_a_meeting_point():
    with pytest.raises(UserError, match=r"rendezvous.*HOST:PORT"):
        TrainParams.checked({"nodes": 2}, "a profile")
