"""vLLM on a CPU reads temperatures that nobody wrote (its issue 55005): found, mended, told."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from eagle3lib.engine.ask_sampler import ASKED
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.preflight import check_sampling, sampling_findings
from eagle3lib.engine.vllm_sampling import MENDED, expand, is_right, mend

NAN = float("nan")


def theirs(output, values, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    """As vLLM 0.32.0 does it: the result goes into an integer copy that is thrown away."""
    copy = output.long()
    expand(copy, values.long(), cu_num_tokens, replace_from, replace_to)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_every_token_gets_its_requests_value(dtype):
    values = torch.tensor([2, 0, 5], dtype=dtype) / (2 if dtype.is_floating_point else 1)
    output = torch.full((6,), -1, dtype=dtype)
    expand(output, values.to(dtype), torch.tensor([2, 5, 6], dtype=torch.int32), 0, 1)
    a, b, c = values[0], 1, values[2]  # 0, which means greedy, is replaced
    assert output.tolist() == [a, a, b, b, b, c]


def test_no_drafted_token_of_a_request_is_no_value():
    output = torch.full((2,), NAN)
    expand(output, torch.tensor([0.5, 0.7, 0.9]), torch.tensor([1, 1, 2]), 0, 1)
    assert output.tolist() == pytest.approx([0.5, 0.9])


def test_a_kernel_is_judged_by_what_it_writes():
    assert is_right(expand) and not is_right(theirs)


def right(output, values, *_):
    output.fill_(float(values[0]))


def other(output, *, only_by_name):
    output.fill_(9.0)


@pytest.mark.parametrize(
    ("kernel", "mended"), [(theirs, True), (right, False)], ids=["wrong", "a version that is right"]
)
def test_a_wrong_kernel_of_a_cpu_is_replaced_at_its_first_call(vllm, caplog, kernel, mended):
    kernels = vllm(kernel)
    mend()
    mend()  # every process loads its plugins, some twice
    assert MENDED not in caplog.text  # nothing ran yet: threads must not start before a fork
    output = torch.full((3,), NAN)
    kernels._expand_kernel_impl(output, torch.tensor([0.7]), torch.tensor([3]), 0, 1)
    assert output.tolist() == pytest.approx([0.7] * 3)
    assert (MENDED in caplog.text) == mended


def test_a_gpu_and_a_kernel_of_another_version_are_left_alone(vllm):
    kernels = vllm(theirs, cpu=False)
    mend()
    assert kernels._expand_kernel_impl is theirs
    kernels = vllm(other)
    mend()
    output = torch.zeros(1)
    kernels._expand_kernel_impl(output, only_by_name=1)
    assert output.tolist() == [9.0]


@pytest.fixture
def vllm(monkeypatch):
    """``vllm(kernel)``: an installed vLLM of which our plugin sees this kernel alone."""

    def make(kernel, cpu=True):
        kernels = SimpleNamespace(_expand_kernel_impl=kernel)
        for name, values in (
            ("vllm", {}),
            ("vllm.platforms", {"current_platform": SimpleNamespace(is_cpu=lambda: cpu)}),
            ("vllm.utils", {"cpu_triton_utils": kernels}),
        ):
            module = ModuleType(name)
            vars(module).update(values)
            monkeypatch.setitem(sys.modules, name, module)
        return kernels

    return make


@pytest.mark.parametrize(
    ("alone", "served", "told"),
    [
        (None, None, []),  # a GPU
        (ASKED, ASKED, []),
        (0.0, ASKED, [("sampling_mended", "note")]),
        (0.0, 0.0, [("sampling_broken", "warning")]),
        (NAN, NAN, [("sampling_broken", "warning")]),
    ],
)
def test_what_the_preflight_says(alone, served, told):
    found = sampling_findings({"alone": alone, "with_plugins": served})
    assert [(f.code, f.severity) for f in found] == told


def test_without_a_drafter_nobody_is_asked(tmp_path):
    assert check_sampling(EngineConfig(tmp_path)) == []
    assert check_sampling(EngineConfig(tmp_path, engine="sglang", drafter=tmp_path)) == []


@pytest.mark.engine
def test_the_installed_vllm_is_mended_in_our_servers_and_only_there(tmp_path, monkeypatch):
    monkeypatch.delenv("EAGLE3_VLLM_PYTHON", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    config = EngineConfig(tmp_path, drafter=tmp_path)
    (found,) = check_sampling(config)
    assert found.code == "sampling_mended" and "0.7 is asked for" in found.evidence
    monkeypatch.setenv("VLLM_PLUGINS", "")
    (found,) = check_sampling(config)
    assert found.code == "sampling_broken"
