"""Which number type is the fast one here, and what "auto" of the parameters becomes."""

import pytest

from eagle3lib.lab import phase_params
from eagle3lib.lab.machine import multiplies_in_bfloat16, visible_gpus
from eagle3lib.lab.notebooks import parameter_cell
from eagle3lib.lab.params import BenchmarkParams, GenerateParams, TrainParams


@pytest.mark.parametrize(
    ("text", "fast"),
    [
        ("processor : 0\nflags\t\t: fpu sse2 avx avx2 fma\n", False),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu avx512f\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("Features\t: fp asimd\n", False),
        ("nothing known\n", True),
    ],
)
def test_bfloat16_needs_instructions_or_a_gpu(tmp_path, text, fast):
    (tmp_path / "cpuinfo").write_text(text)
    assert multiplies_in_bfloat16(tmp_path / "cpuinfo", tmp_path / "no-gpu") == fast
    assert multiplies_in_bfloat16(tmp_path / "none", tmp_path / "no-gpu")
    assert multiplies_in_bfloat16(tmp_path / "cpuinfo", tmp_path)


@pytest.mark.parametrize(("fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_settled_where_parameters_are_read(monkeypatch, fast, dtype):
    monkeypatch.setattr(phase_params, "multiplies_in_bfloat16", lambda: fast)
    for kind, name in (
        (GenerateParams, "dtype"),
        (BenchmarkParams, "dtype"),
        (TrainParams, "precision"),
    ):
        settled = kind.checked({name: "auto"}, "test")
        assert getattr(settled, name) == dtype
        assert "auto" not in settled.model_dump(mode="json")[name]
        assert getattr(kind.checked({name: "float32"}, "test"), name) == "float32"
        # A notebook's cell is the same on every machine.
        assert f'{name}: str = "auto"' in parameter_cell(settled)


@pytest.mark.parametrize(
    ("named", "used"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("1, 7, 0", [1]),  # nothing counts after one that is not there
        ("GPU-b,GPU-aa", [2, 0]),
        ("GPU-a", []),  # two begin so
        ("MIG-a", [0, 1, 2]),
    ],
)
def test_gpus_are_those_that_cuda_is_told(monkeypatch, named, used):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus(["GPU-aa", "GPU-ab", "GPU-bb"]) == used
