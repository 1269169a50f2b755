"""Capture through SGLang's forward hooks, of a server in its shapes (``sglang_shaped.py``)."""

import json
import sys
from pathlib import Path

import pytest
import sglang_shaped
import torch
from safetensors.torch import save_file

from eagle3lib.engine.config import EngineConfig, shared_environment
from eagle3lib.lab import child
from eagle3lib.lab.errors import UserError
from eagle3lib.target import sglang_hooks
from eagle3lib.target.capture import InProcess, capture
from eagle3lib.target.forward import forward_states
from eagle3lib.target.sglang_source import FromSglang, check_hooks_run, hooked_config, read_hooked
from eagle3lib.target.states import StateStore

SLOTS = (5, 2, 7)
ROW = [1, 17, 230, 4, 99]


@pytest.fixture
def shaped(tmp_path, monkeypatch):
    """``shaped(version)`` poses as SGLang's interpreter, behind ``EAGLE3_SGLANG_PYTHON``."""
    python = tmp_path / "python"
    script = Path(__file__).with_name("sglang_shaped.py")
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("EAGLE3_SGLANG_PYTHON", str(python))
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(child, "STOP_DEADLINE_S", 4.0)

    def of(version):
        monkeypatch.setenv("SHAPED_VERSION", version)

    of("0.5.23")
    return of


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_states_out_of_hooks_are_transformers(shaped, tiny_target, tiny_rows, tmp_path):
    """The same store from either source, the pre-norm last state among them, though the norms add
    in place and each forward holds another's request too."""
    here = InProcess(tiny_target, SLOTS, "float32", 64)
    engine = FromSglang(tiny_target, SLOTS, "float32", tmp_path / "work", 200)
    stores = []
    for name, source in (("here", here), ("engine", engine)):
        capture(tiny_target, tiny_rows, tmp_path / name, slots=SLOTS, dtype="float32",
                batch_tokens=64, shard_rows=5, source=source)  # fmt: skip
        stores.append(StateStore(tmp_path / name))
    for entry in stores[0].entries:
        expected, found = (store.row(entry) for store in stores)
        assert torch.equal(found.token_ids, expected.token_ids)
        for part in ("slots", "last"):
            torch.testing.assert_close(
                getattr(found, part), getattr(expected, part), atol=1e-3, rtol=1e-4
            )
    assert not list((tmp_path / "work").glob(".from-engine-*")), "nothing is left on the way"


@pytest.fixture
def hooked(tiny_model, tiny_target, tmp_path, monkeypatch):
    """``hooked(change)`` is the file that one request's forward leaves, hooks attached in this
    process, the model changed by ``change`` after that."""
    monkeypatch.setitem(sys.modules, "eagle3_sglang_hooks", sglang_hooks)
    config = hooked_config(tiny_target, [3, 5, 10], tmp_path, dtype="float32", max_model_len=99)

    def forward(change=lambda model: None, rid="eagle3-1", **batch):
        model = sglang_shaped.Model(tiny_model)
        sglang_shaped.attach(model, json.loads(config.extra_flags[1]))
        change(model)
        model(sglang_shaped.batch_of([{"rid": rid, "input_ids": ROW}], **batch))
        return tmp_path / f"{rid}.safetensors"

    return forward


def test_one_requests_file(hooked, tiny_model):
    """The last state of SGLang's response would be the normed one; this is what the norm takes."""
    found = read_hooked(hooked(), ROW, 3)
    expected = forward_states(tiny_model, [ROW], (3, 5))[0]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


def test_norms_that_no_hook_sees_are_told(hooked):
    """Fused with an all-reduce, a norm is no call of its module."""
    path = hooked(lambda model: model.model.layers[3].input_layernorm._forward_hooks.clear())
    with pytest.raises(UserError, match=r"no state passed the norm before layers \[3\]"):
        read_hooked(path, ROW, 3)


def test_a_shared_prefix_is_told(hooked):
    with pytest.raises(UserError, match="first 2 tokens were not computed anew"):
        read_hooked(hooked(prefix_tokens=2), ROW, 3)


def test_a_forward_without_hooks_is_told(hooked):
    """A replayed graph runs none; nor is a stranger's request written."""
    path = hooked(lambda model: [m._forward_hooks.clear() for m in model.modules()])
    for left in (path, hooked(rid="HEALTH_CHECK_1")):
        with pytest.raises(UserError, match=r"(?s)hooks wrote nothing.*Registered forward hook"):
            read_hooked(left, ROW, 3)


def test_hooks_are_asked_for_by_the_flags_of_sglang(tiny_target, tmp_path):
    config = hooked_config(tiny_target, [2, 5, 10], tmp_path, dtype="bfloat16", max_model_len=100)
    flags = dict(zip(config.extra_flags, config.extra_flags[1:], strict=False))
    specs = json.loads(flags["--forward-hooks"])
    assert [s["target_modules"][0] for s in specs[:3]] == [
        "*model.layers.2.input_layernorm", "*model.layers.5.input_layernorm", "*model.norm",
    ]  # fmt: skip
    assert specs[3]["config"] == {"layers": [2, 5, 10], "folder": str(tmp_path)}
    assert flags["--chunked-prefill-size"] == "-1"
    assert not config.compile and not config.prefix_cache
    # SGLang refuses a prompt that leaves fewer than six tokens of the context.
    assert config.max_model_len >= 100 - 1 + 7


def test_the_engine_finds_the_hooks_beside_what_was_on_its_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/before")
    config = EngineConfig(Path("x"), engine="sglang", modules=tmp_path)
    assert shared_environment(config)["PYTHONPATH"].split(":") == [str(tmp_path), "/before"]
    assert "PYTHONPATH" not in shared_environment(EngineConfig(Path("x")))


def test_an_sglang_that_was_never_read_is_refused(shaped):
    shaped("0.5.9")
    with pytest.raises(UserError, match=r"(?s)SGLang 0\.5\.9 .*0\.5\.15 or later"):
        check_hooks_run(EngineConfig(Path("x"), engine="sglang"))


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"compile": True}, "compile=True"), ({"pipeline_parallel": 2}, "pipeline_parallel=2")],
)
def test_settings_that_hide_states_are_refused(shaped, changed, named):
    with pytest.raises(UserError, match=named):
        check_hooks_run(EngineConfig(Path("x"), engine="sglang", **changed))
    check_hooks_run(EngineConfig(Path("x"), engine="sglang"))


def test_another_rows_states_are_refused(tmp_path):
    path = tmp_path / "eagle3-1.safetensors"
    states = torch.randn(5, 3, 8)
    save_file({"hidden_states": states, "token_ids": torch.tensor(ROW)}, path)
    assert torch.equal(read_hooked(path, ROW, 3), states)
    assert list(tmp_path.iterdir()) == []
    save_file({"hidden_states": states, "token_ids": torch.tensor(ROW[::-1])}, path)
    with pytest.raises(UserError, match="other tokens"):
        read_hooked(path, ROW, 3)
    save_file({"hidden_states": states, "token_ids": torch.tensor(ROW)}, path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="can't be read"):
        read_hooked(path, ROW, 3)
