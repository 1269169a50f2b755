"""The bench of an update: its counts are those of its options, and a missing GPU is said."""

import pytest
import torch

from eagle3lib.training.bench_step import measure, parse

SMALL = {"device": "cpu", "precision": "float32", "rows": 2, "tokens": 40, "steps": 2, "hidden": 64,
         "intermediate": 128, "heads": 4, "kv-heads": 2, "vocab": 500, "draft-vocab": 100,
         "repeats": 2}  # fmt: skip


def test_an_update_is_timed_beside_the_peak_of_its_own_moment(monkeypatch):
    peaks = iter((1e12, 2e12))
    monkeypatch.setattr("eagle3lib.training.bench_step.gemm_peak", lambda *_: next(peaks))
    found = measure(parse([f"--{name}={value}" for name, value in SMALL.items()]))
    first, second = found["updates_s"]
    assert found["tokens_per_s"] == pytest.approx(2 * 40 / ((first + second) / 2))
    assert found["shares"] == pytest.approx(
        [found["flop"] / first / 1e12, found["flop"] / second / 2e12]
    )
    assert next(peaks, None) is None, "one peak an update"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there_is_said(capsys):
    with pytest.raises(SystemExit):
        parse([])
    assert "no GPU here: --device cpu" in capsys.readouterr().err
