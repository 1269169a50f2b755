"""vLLM on a CPU reads temperatures that nobody wrote (its issue 55005): found, mended, told."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from eagle3lib.engine.ask_sampler import ASKED
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.preflight import check_sampling, sampling_findings
from eagle3lib.engine.vllm_sampling import expand, is_right, mend

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


@pytest.mark.parametrize(
    ("cpu", "kernel", "mended"),
    [
        (True, theirs, True),
        (False, theirs, False),
        (True, lambda output, *_: output.fill_(0.7), False),  # a version that is right stays
        (True, lambda output: None, False),  # one with another signature is not ours to judge
    ],
    ids=["wrong", "on a GPU", "right", "another version"],
)
def test_only_a_wrong_kernel_of_a_cpu_is_replaced(monkeypatch, cpu, kernel, mended):
    platform = SimpleNamespace(is_cpu=lambda: cpu, import_kernels=lambda: None)
    kernels = SimpleNamespace(_expand_kernel_impl=kernel)
    for name, values in (
        ("vllm", {}),
        ("vllm.platforms", {"current_platform": platform}),
        ("vllm.utils", {"cpu_triton_utils": kernels}),
    ):
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    mend()
    assert (kernels._expand_kernel_impl is expand) == mended
    assert mended or kernels._expand_kernel_impl is kernel


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
