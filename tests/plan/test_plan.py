"""A plan as a whole: published sizes, refusals with the largest setting that fits, sources."""

from __future__ import annotations

import json

import pytest
from public_shapes import KIMI_K25, LLAMA_8B, PUBLIC, QWEN3_8B, changed

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.params import PlanParams
from eagle3lib.lab.profile import load_profile
from eagle3lib.plan.gpus import GPUS, choose_device
from eagle3lib.plan.phases import state_bytes
from eagle3lib.plan.plan import make_plan, plan_text
from eagle3lib.plan.shape import Shape
from eagle3lib.plan.source import Source, open_source

MACHINE = {"disk_free_bytes": 10**12, "memory_available_bytes": 10**12, "cores": 2, "gpus": []}
CPU = {"gpu": "cpu", "bandwidth_gb_per_s": 30.0}
KIMI = {"gpu": "rtx-pro-6000", "gpus": 8, "batch_sizes": "1", "answer_tokens": 14_439_174,
        "prompt_tokens_per_answer_token": 0.0, "max_model_len": 8192}  # fmt: skip


def planned(raw, machine=MACHINE, **values):
    source = Source("t", Shape(raw), "a test", None, "f")
    return make_plan(PlanParams(**values), source, machine)


def errors(plan):
    return [f.code for f in plan.findings if f.severity == "error"]


def remedy(plan, code):
    return next(f.remedy for f in plan.findings if f.code == code)


def test_kimi_states_are_those_of_the_published_runs():
    """57,344 bytes a token; 828 GB for the 14.4M tokens of one run; 344 TB for 6B tokens."""
    assert state_bytes(7168, "bf16") == 57_344
    assert 6e9 * state_bytes(7168, "bf16") / 1e12 == pytest.approx(344, rel=0.001)
    plan = planned(KIMI_K25, **KIMI)
    assert plan.numbers["target"]["state_bytes_per_token"] == 57_344
    assert plan.numbers["storage"][0]["total_bytes"] == pytest.approx(828e9, rel=0.0001)


def test_a_conversation_of_an_8b_target_takes_67_mb():
    """SpecForge#426 and others: 2,048 tokens x 4 states x 4,096 x 2 bytes."""
    assert 2048 * state_bytes(4096, "bf16") == 67_108_864


def test_kimi_int4_fits_eight_cards_of_96_gb_and_not_six():
    assert errors(planned(KIMI_K25, **KIMI)) == []
    tight = planned(KIMI_K25, **KIMI | {"gpus": 6})
    assert errors(tight) == ["memory"]
    fewest = int(remedy(tight, "memory").split("gpus=")[1].split()[0])
    assert 6 < fewest <= 8
    assert errors(planned(KIMI_K25, **KIMI | {"gpus": fewest, "batch_sizes": "1"})) == []


def test_the_storage_formats_are_ordered_and_compact_is_at_most_042_at_40_percent_answers():
    sizes = [state_bytes(576, name, answer_share=0.4) for name in ("bf16", "fp8", "compact")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] <= 0.42 * state_bytes(576, "bf16")  # four whole states, as other tools keep
    assert state_bytes(576, "stream") == 0


@pytest.mark.parametrize("raw", PUBLIC.values(), ids=PUBLIC)
def test_every_public_shape_plans_to_plain_json(raw):
    plan = planned(raw, gpu="h200", gpus=16, storage="stream")
    assert json.loads(json.dumps(plan.numbers)) == plan.numbers
    assert plan_text(plan).startswith("answer\n  does it fit")


def test_streamed_states_cost_a_pass_of_the_target_each_epoch_and_its_weights_in_training():
    stored, streamed = (
        planned(LLAMA_8B, gpu="h100", epochs=5, storage=name) for name in ("bf16", "stream")
    )
    kept, made = (plan.numbers["phases"][1] for plan in (stored, streamed))
    assert made["tokens"] == 5 * kept["tokens"]
    assert made["disk_bytes"] == 0
    more = [plan.numbers["phases"][2]["memory_bytes"] for plan in (streamed, stored)]
    ends = 2 * 2 * 128_256 * 4096  # embedding and head, which both hold
    assert more[0] - more[1] == streamed.numbers["target"]["weight_bytes"] - ends


def test_a_full_disk_is_refused_and_the_named_number_of_tokens_fits():
    small = MACHINE | {"disk_free_bytes": 2 * 10**9}
    plan = planned(QWEN3_8B, small, gpu="h200", answer_tokens=200_000, draft_vocab_size=512)
    assert errors(plan) == ["disk"]
    assert "no number" in remedy(plan, "disk")  # checkpoints alone are larger than this disk
    small = MACHINE | {"disk_free_bytes": 10**10}
    plan = planned(QWEN3_8B, small, gpu="h200", answer_tokens=200_000)
    most = int(remedy(plan, "disk").split("answer_tokens=")[1].split()[0])
    fits = {"gpu": "h200", "draft_vocab_size": 4096}
    assert errors(planned(QWEN3_8B, small, answer_tokens=most, **fits)) == []
    assert errors(planned(QWEN3_8B, small, answer_tokens=int(most * 1.02), **fits)) == ["disk"]
    assert errors(planned(QWEN3_8B, small, answer_tokens=200_000, storage="stream", **fits)) == []


def test_too_many_sequences_are_refused_and_the_named_batch_fits():
    given = {"gpu": "rtx-4090", "max_model_len": 4096, "batch_sizes": "1,64"}
    plan = planned(LLAMA_8B, **given)
    assert "memory" in errors(plan)
    most = int(remedy(plan, "memory").split("batch_sizes=")[1].split()[0])
    assert "memory" not in errors(planned(LLAMA_8B, **given | {"batch_sizes": str(most)}))
    assert "memory" in errors(planned(LLAMA_8B, **given | {"batch_sizes": str(most + 1)}))


def test_too_long_a_conversation_is_refused_and_the_named_length_fits():
    given = {"gpu": "rtx-4090", "batch_sizes": "1"}
    plan = planned(LLAMA_8B, **given, max_model_len=100_000)
    most = int(remedy(plan, "memory").split("max_model_len=")[1].split()[0])
    assert "memory" not in errors(planned(LLAMA_8B, **given, max_model_len=most))
    assert "memory" in errors(planned(LLAMA_8B, **given, max_model_len=most + 10))


def test_training_that_does_not_fit_names_the_length_that_does():
    given = {"gpu": "h100", "draft_vocab_size": 128_256, "steps": 7, "batch_sizes": "1"}
    plan = planned(LLAMA_8B, **given, max_model_len=60_000)
    assert errors(plan) == ["training-memory"]
    most = int(remedy(plan, "training-memory").split("max_model_len=")[1].split()[0])
    assert errors(planned(LLAMA_8B, **given, max_model_len=most)) == []


def test_a_context_beyond_the_targets_is_refused():
    plan = planned(QWEN3_8B, gpu="h200", max_model_len=50_000, batch_sizes="1")
    assert "context" in errors(plan)
    assert "40960" in remedy(plan, "context")


def test_a_target_with_too_few_layers_is_refused_and_an_unknown_family_warned_of():
    assert errors(planned(changed(QWEN3_8B, num_hidden_layers=6), gpu="h200")) == ["slots"]
    plan = planned(changed(QWEN3_8B, model_type="newthing"), gpu="h200")
    assert [f.severity for f in plan.findings if f.code == "unknown-family"] == ["warning"]


def test_measured_speeds_replace_estimates():
    plan = planned(KIMI_K25, **KIMI, capture_tokens_per_s=3165.0)
    capture = plan.numbers["phases"][1]
    assert capture["tokens_per_s"] == 3165.0
    assert capture["hours"] == pytest.approx(14_439_174 / 3165 / 3600, abs=1e-3)


def test_the_demo_is_estimated_within_a_factor_of_two_of_the_lab_log():
    """Two cores: 430 tok/s generated, 1,840 captured, 4,316 trained."""
    from public_shapes import SMOLLM2

    speeds = [line["tokens_per_s"] for line in planned(SMOLLM2, **CPU).numbers["phases"][:3]]
    for found, measured in zip(speeds, (430, 1840, 4316), strict=True):
        assert measured / 2 < found < measured * 2


def test_figures_given_by_hand_stand_above_the_table():
    cfg = PlanParams(gpu="h100", bandwidth_gb_per_s=2000, collective_us=7)
    device = choose_device(cfg, MACHINE)
    assert device.bandwidth_bytes_per_s == 2e12
    assert device.collective_s == pytest.approx(7e-6)
    assert device.flops_per_s == GPUS["h100"].flops_per_s
    assert "bandwidth" in device.source


def test_this_machines_gpu_is_found_by_its_product_name():
    machine = MACHINE | {"gpus": [{"name": "NVIDIA H200", "memory_bytes": 10**11}]}
    device = choose_device(PlanParams(), machine)
    assert (device.name, device.memory_bytes) == ("h200", 1e11)


def test_an_unknown_gpu_needs_its_figures():
    with pytest.raises(UserError, match="h200"):
        choose_device(PlanParams(gpu="tpu-9"), MACHINE)
    cfg = PlanParams(gpu="tpu-9", bandwidth_gb_per_s=1, tflops=1, memory_gb=1)
    assert choose_device(cfg, MACHINE).memory_bytes == 1e9


def test_a_folder_without_weights_or_tokenizer_can_be_planned(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    source = open_source(str(tmp_path))
    assert source.shape.total_parameters == Shape(QWEN3_8B).total_parameters
    assert source.chat_template() == ""
    (tmp_path / "chat_template.jinja").write_text("{{ '<think>' }}")
    assert source.reasoning_markers() == ["<think>"]


def test_a_folder_with_weights_has_the_fingerprint_of_later_phases(tiny_target):
    """Else the plan would bind the run to another target than the capture finds."""
    assert open_source(str(tiny_target.folder)).fingerprint == tiny_target.fingerprint


@pytest.mark.parametrize("text", ["{", "[1]", "{}"], ids=["cut", "list", "empty"])
def test_a_broken_config_is_one_message(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError):
        make_plan(PlanParams(**CPU), open_source(str(tmp_path)), MACHINE)


def test_the_hub_out_of_reach_is_said_and_a_shipped_shape_used(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    assert "no route to host" in open_source("Qwen/Qwen3-8B").origin
    with pytest.raises(UserError, match="no route to host"):
        open_source("nobody/nothing")


@pytest.mark.parametrize("sizes", ["", "8,1", "1,1", "0,2", "one", "1;2"])
def test_batch_sizes_that_do_not_rise_are_refused(sizes):
    with pytest.raises(UserError, match="batch_sizes"):
        PlanParams.checked({"batch_sizes": sizes}, "a test")


def test_one_batch_size_may_be_a_bare_number():
    assert PlanParams.checked({"batch_sizes": 16}, "a test").batches() == [16]


PROFILES = sorted(path.stem for path in (ROOT / "params").glob("*.yaml"))


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_plans_without_weights_and_fits_the_machine_it_names(name, monkeypatch):
    """Each says in its first line what it needs; the Hub is out of reach here."""

    def unreachable(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    cfg = load_profile(name)["00_plan"]
    source = open_source(cfg.target)
    assert errors(make_plan(cfg, source, MACHINE)) == []


def test_odd_spellings_of_configs_are_read():
    """Nulls where a key means nothing, sizes inside a wrapper, rotary settings per layer type."""
    nulls = changed(LLAMA_8B, head_dim=None, rope_scaling=None, sliding_window=None)
    assert Shape(nulls).total_parameters == Shape(LLAMA_8B).total_parameters
    text = {k: v for k, v in LLAMA_8B.items() if k != "architectures"}
    wrapped = {"architectures": ["SomeVLForConditionalGeneration"], "model_type": "some_vl",
               "text_config": text}  # fmt: skip
    facts = planned(wrapped, gpu="h100").numbers["target"]
    assert facts["parameters"] == Shape(LLAMA_8B).total_parameters
    assert "inside SomeVL" in facts["text model"]
    per_type = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    rope = planned(changed(LLAMA_8B, rope_parameters=per_type), gpu="h100").numbers["target"][
        "rope"
    ]
    assert "full_attention: default, base 1e+06" in rope
    without = {k: v for k, v in LLAMA_8B.items() if k != "rope_theta"}
    assert "no base named" in planned(without, gpu="h100").numbers["target"]["rope"]


def test_templates_of_every_place_are_found(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": named, "added_tokens_decoder": {"1": {"content": "<think>"}}})
    )
    source = open_source(str(tmp_path))
    assert source.chat_template() == "D"
    assert source.reasoning_markers() == ["<think>"]
