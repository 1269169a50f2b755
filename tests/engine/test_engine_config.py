"""One description, two engines: the flags are written out as they were read in the sources."""

import json
import sys
from pathlib import Path

import pytest

from eagle3lib.engine import command as commands
from eagle3lib.engine import sglang, vllm
from eagle3lib.engine.command import command, environment, shown
from eagle3lib.engine.config import EngineConfig, check_config, interpreter
from eagle3lib.engine.settings import ServeParams
from eagle3lib.lab.errors import UserError

FULL = EngineConfig(
    Path("/t"), dtype="bfloat16", max_model_len=8192, max_num_seqs=64, drafter=Path("/d"),
    num_speculative_tokens=5, compile=True, extra_flags=("--swap-space", "0"),
    attention_backend="A", drafter_attention_backend="B", tensor_parallel=4, pipeline_parallel=2,
    data_parallel=3, quantization="q", drafter_quantization="fp8", reasoning_parser="kimi_k2",
    tool_parser="kimi_k2", memory_share=0.85, prefix_cache=True, trust_remote_code=True, p2p=False,
)  # fmt: skip


def test_every_setting_reaches_vllm():
    assert vllm.flags(FULL) == [
        "/t", "--served-model-name", "target", "--dtype", "bfloat16", "--max-model-len", "8192",
        "--max-num-seqs", "64", "--seed", "0", "--generation-config", "vllm",
        "--disable-uvicorn-access-log", "--enable-prefix-caching",
        "--tensor-parallel-size", "4", "--pipeline-parallel-size", "2", "--data-parallel-size", "3",
        "--attention-backend", "A", "--quantization", "q", "--reasoning-parser", "kimi_k2",
        "--tool-call-parser", "kimi_k2", "--gpu-memory-utilization", "0.85",
        "--enable-auto-tool-choice", "--trust-remote-code", "--speculative-config",
        '{"method": "eagle3", "model": "/d", "num_speculative_tokens": 5, "quantization": "fp8", '
        '"attention_backend": "B"}',
        "--per-request-spec-decode-metrics", "detailed", "--swap-space", "0",
    ]  # fmt: skip


def test_an_older_vllm_is_not_asked_for_a_record_that_it_lacks(tmp_path, monkeypatch):
    """vLLM 0.26 dies at an argument that it does not know."""
    engine = tmp_path / "vllm" / "engine"
    engine.mkdir(parents=True)
    (engine.parent / "__init__.py").touch()
    (engine / "arg_utils.py").write_text("num_speculative_tokens: int\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    vllm._knows_argument.cache_clear()
    flags = vllm.flags(FULL)
    vllm._knows_argument.cache_clear()
    assert "--per-request-spec-decode-metrics" not in flags
    assert "--speculative-config" in flags


def test_every_setting_reaches_sglang():
    assert sglang.flags(FULL) == [
        "--model-path", "/t", "--served-model-name", "target", "--dtype", "bfloat16",
        "--context-length", "8192", "--max-running-requests", "64", "--random-seed", "0",
        "--sampling-defaults", "openai", "--enable-metrics", "--log-level-http", "warning",
        "--tp-size", "4", "--pp-size", "2", "--dp-size", "3", "--attention-backend", "A",
        "--quantization", "q", "--reasoning-parser", "kimi_k2", "--tool-call-parser", "kimi_k2",
        "--mem-fraction-static", "0.85", "--trust-remote-code",
        "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/d",
        "--speculative-num-steps", "5", "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", "6", "--speculative-draft-model-quantization", "fp8",
        "--speculative-draft-attention-backend", "B", "--swap-space", "0",
    ]  # fmt: skip


def after(flags, flag):
    return flags[flags.index(flag) + 1]


@pytest.mark.parametrize(("k", "topk", "tree", "told"), [(3, 1, None, "4"), (1, 1, None, "2"),
                         (3, 4, None, "13"), (3, 4, 31, "32")])  # fmt: skip
def test_sglang_counts_the_root_and_vllm_does_not(k, topk, tree, told):
    chain = EngineConfig(Path("/t"), drafter=Path("/d"), num_speculative_tokens=k, topk=topk,
                         tree_tokens=tree, engine="sglang")  # fmt: skip
    assert check_config(chain) == []
    flags = sglang.flags(chain)
    assert after(flags, "--speculative-num-draft-tokens") == told
    assert after(flags, "--speculative-num-steps") == str(k)
    if topk == 1:
        config = json.loads(after(vllm.flags(chain), "--speculative-config"))
        assert config["num_speculative_tokens"] == k


def test_a_drafter_does_not_inherit_the_targets_quantisation():
    """SGLang issue 28196: a BF16 drafter fails to load under a quantised target."""
    flags = sglang.flags(EngineConfig(Path("/t"), drafter=Path("/d"), quantization="w4a16"))
    assert after(flags, "--speculative-draft-model-quantization") == "unquant"


BAD = [
    ({"topk": 2, "engine": "vllm"}, "vLLM drafts chains"),
    # SpecForge issue 310: steps 4, topk 1, 24 draft tokens.
    ({"topk": 1, "num_speculative_tokens": 4, "tree_tokens": 23, "engine": "sglang"}, "23 tree"),
    ({"topk": 2, "tree_tokens": 11, "engine": "sglang"}, "11 tree tokens"),  # 2 + 4 + 4 = 10
    ({"drafter_dtype": "float16"}, "drafter in float16, target in bfloat16"),
    ({"tensor_parallel": 0}, "tensor, pipeline and data"),
    ({"memory_share": 1.5}, "memory_share"),
]


@pytest.mark.parametrize(("changes", "told"), BAD, ids=lambda v: str(v)[:40])
def test_what_an_engine_would_silently_change_is_refused(changes, told):
    config = EngineConfig(Path("/t"), drafter=Path("/d"), **changes)
    with pytest.raises(UserError, match=told):
        command(config, 1)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_two_arms_differ_in_the_flags_of_speculation_alone(engine):
    module = vllm if engine == "vllm" else sglang
    plain = module.flags(EngineConfig(Path("/t"), engine=engine))
    arm = module.flags(EngineConfig(Path("/t"), engine=engine, drafter=Path("/d")))
    extra = [flag for flag in arm if flag.startswith("--") and flag not in plain]
    assert extra and all("spec" in flag for flag in extra)
    for flag in extra:
        del arm[arm.index(flag) : arm.index(flag) + 2]
    assert arm == plain


def test_the_fair_conditions_of_a_measurement_are_the_default():
    flags = vllm.flags(EngineConfig(Path("/t")))
    assert "--no-enable-prefix-caching" in flags and "--enforce-eager" in flags
    assert after(flags, "--generation-config") == "vllm"
    flags = sglang.flags(EngineConfig(Path("/t")))
    assert {"--disable-radix-cache", "--disable-decode-cuda-graph",
            "--disable-prefill-cuda-graph"} <= set(flags)  # fmt: skip
    assert after(flags, "--sampling-defaults") == "openai"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.2", "::", "example.org"])
def test_an_address_that_others_reach_needs_a_key(host):
    with pytest.raises(UserError, match=r"without an API key"):
        command(EngineConfig(Path("/t")), 1, host)
    assert host in command(EngineConfig(Path("/t")), 1, host, "key")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.1"])
def test_loopback_needs_no_key(host):
    assert commands.is_loopback(host) and command(EngineConfig(Path("/t")), 1, host)


def test_a_key_stays_out_of_what_is_shown_and_out_of_vllms_arguments(monkeypatch):
    monkeypatch.setenv("EAGLE3_SGLANG_PYTHON", sys.executable)
    argv = command(EngineConfig(Path("/t"), engine="sglang"), 1, api_key="s3cret")
    assert "s3cret" in argv and "s3cret" not in shown(argv) and len(argv) == len(shown(argv))
    assert "s3cret" not in command(EngineConfig(Path("/t")), 1, api_key="s3cret")
    assert environment(1, EngineConfig(Path("/t")), "s3cret")["VLLM_API_KEY"] == "s3cret"


def test_no_word_of_a_parameter_is_read_by_a_shell():
    nasty = "/t; rm -rf $HOME `x` && y"
    argv = command(EngineConfig(Path(nasty), extra_flags=("--a=$(x)",)), 1)
    assert nasty in argv and "--a=$(x)" in argv


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_usage_statistics_are_off_and_local_targets_need_no_network(tmp_path, monkeypatch, engine):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    env = environment(2, EngineConfig(tmp_path, engine=engine))
    assert env["OMP_NUM_THREADS"] == "2" and env["HF_HUB_OFFLINE"] == "1"
    assert env["DO_NOT_TRACK"] == "1" and env["HF_HUB_DISABLE_TELEMETRY"] == "1"
    if engine == "vllm":
        assert env["VLLM_NO_USAGE_STATS"] == "1" and env["PYTHONPATH"].split(":")[-1] == "/ours"
    hub = EngineConfig(Path("org/model"), engine=engine, p2p=False)
    assert "HF_HUB_OFFLINE" not in environment(2, hub)
    assert environment(2, hub)["NCCL_P2P_DISABLE"] == "1" and "NCCL_P2P_DISABLE" not in env


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_folder_of_modules_reaches_either_engine(tmp_path, monkeypatch, engine):
    """vLLM's own addition to the path stands beside it, not in its place."""
    monkeypatch.delenv("EAGLE3_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/before")
    config = EngineConfig(Path("/t"), engine=engine, modules=tmp_path)
    assert environment(1, config)["PYTHONPATH"].split(":")[-2:] == [str(tmp_path), "/before"]


def test_the_interpreter_is_our_own_for_vllm_and_named_for_sglang(monkeypatch, tmp_path):
    monkeypatch.delenv("EAGLE3_VLLM_PYTHON", raising=False)
    monkeypatch.delenv("EAGLE3_SGLANG_PYTHON", raising=False)
    assert interpreter("vllm") == sys.executable
    with pytest.raises(UserError, match="make setup-sglang"):
        interpreter("sglang")
    for variable, engine in (("EAGLE3_VLLM_PYTHON", "vllm"), ("EAGLE3_SGLANG_PYTHON", "sglang")):
        monkeypatch.setenv(variable, str(tmp_path / "none"))
        with pytest.raises(UserError, match=variable):
            interpreter(engine)
        monkeypatch.setenv(variable, sys.executable)
        assert interpreter(engine) == sys.executable


def test_every_parameter_of_serve_reaches_the_engines_settings():
    """A name that is missing on either side would be a setting that does nothing."""
    changed = {
        "engine": "sglang", "dtype": "float16", "max_model_len": 7, "max_num_seqs": 7,
        "drafter": "/d", "drafter_dtype": "float16", "num_speculative_tokens": 7, "topk": 7,
        "tree_tokens": 7, "attention_backend": "x", "drafter_attention_backend": "x",
        "tensor_parallel": 7, "pipeline_parallel": 7, "data_parallel": 7, "quantization": "x",
        "drafter_quantization": "x", "reasoning_parser": "x", "tool_parser": "x",
        "memory_share": 0.7, "kv_cache_gb": 7, "compile": False, "prefix_cache": False,
        "p2p": False, "trust_remote_code": True,
    }  # fmt: skip
    server = {"host", "port", "deadline_s", "stall_s", "log"}
    assert set(changed) == set(ServeParams.model_fields) - server
    before = ServeParams().config(Path("/t"))
    for name, value in changed.items():
        after = ServeParams.checked({name: value}).config(Path("/t"), ("-x",))
        assert getattr(after, name) != getattr(before, name), name
    assert after.extra_flags == ("-x",)
    # What is left out is the engine's own choice, not an empty text.
    assert before.attention_backend is None and before.tree_tokens is None
    assert before.memory_share is None and before.drafter is None
