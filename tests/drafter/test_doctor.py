"""The doctor names what the field reports of other projects took weeks to find; a test a report."""

import dataclasses
import json
import sys

import pytest
import torch

from eagle3lib.drafter.config import MLA
from eagle3lib.drafter.doctor import examine
from eagle3lib.drafter.doctor_probe import Answer, ask_engine
from eagle3lib.drafter.formats_table import DOCUMENT, probe_table

IDS = "eagle_aux_hidden_state_layer_ids"
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture
def look(tiny_target):
    """Findings by code; the rules alone are asked."""

    def run(folder, engine="all", target=tiny_target, **options):
        found = examine(folder.path, target, engine, **({"ask": None} | options))
        return {f.code: f for f in found.findings}

    return run


def changed_target(target, **config):
    return dataclasses.replace(target, config=target.config | config)


def test_our_own_folder_has_nothing_wrong(make_folder, look):
    assert look(make_folder()) == {}


def test_every_reader_takes_the_trained_states_of_our_own_folder(make_folder, tiny_target):
    found = examine(make_folder().path, tiny_target, ask=None)
    assert set(found.facts) == {"vllm-v1", "vllm-v2", "sglang"}
    for facts in found.facts.values():
        assert facts["states (HF index)"].startswith("[2, 5, 7], outputs of layers 1, 4, 6")


def test_c1_random_embeddings_are_named_unless_declared(make_folder, look):
    """TorchSpec#38: an export that saved random embeddings; poor in vLLM, fine in SGLang."""
    folder = make_folder(own_embeddings=True)
    found = look(folder)["embeddings-unrelated"]
    assert found.severity == "error" and "0 of 300 rows identical" in found.title
    assert "embeddings-unrelated" not in look(folder, own_embeddings=True)
    assert look(folder, "sglang")["sglang-embeddings"].severity == "error"


def test_c1_a_copy_and_trained_embeddings_are_no_error(make_folder, look, target_head):
    copied = make_folder().put(embed_tokens__weight=target_head.embedding)
    assert look(copied) == {}
    moved = target_head.embedding + 0.05 * torch.randn_like(target_head.embedding)
    found = look(copied.put(embed_tokens__weight=moved))
    assert set(found) == {"sglang-embeddings"}


def test_c2_which_embeddings_each_engine_uses_is_told(make_folder, tiny_target):
    """vllm#28549: a drafter's own ones were ignored, and nothing said so."""
    own = examine(make_folder(own_embeddings=True).path, tiny_target, ask=None).facts
    assert own["vllm-v1"]["embeddings"].startswith("its own (in the folder: own (0 of 300")
    assert own["sglang"]["embeddings"].startswith("the target's (in the folder: own")
    plain = examine(make_folder("plain").path, tiny_target, ask=None).facts
    assert plain["vllm-v2"]["embeddings"] == "the target's (in the folder: absent)"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_theta": 5.0}, "contradict"),
        ({"rope_theta": None, "rope_parameters": None}, "no rope_theta"),
    ],
)
def test_c4_rotary_spellings_in_conflict_or_without_a_base(make_folder, look, changes, told):
    found = look(make_folder().change(**changes))["unreadable"]
    assert found.severity == "error" and told in found.title


def test_c4_another_base_than_the_targets_is_named_with_both(make_folder, look):
    folder = make_folder(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    found = look(folder)["rope-differs"]
    assert "base 1e+06" in found.title and "target's 10000" in found.title


def test_c6_dropped_scaling_is_seen_in_the_frequencies(make_folder, look, tiny_target):
    """A converter that drops rope_scaling: the same base, another schedule."""
    yarn = changed_target(tiny_target, rope_parameters=YARN)
    assert "(yarn)" in look(make_folder(), target=yarn)["rope-differs"].title
    assert "rope-differs" not in look(make_folder("same", rope_parameters=YARN), target=yarn)


def test_c7_the_servers_limit_beyond_the_rotary_table(make_folder, look):
    """vllm#48894: an illegal access beyond the table."""
    folder = make_folder()
    found = look(folder, max_model_len=257)["beyond-rotary-table"]
    assert found.severity == "error" and "257" in found.title and "256" in found.title
    assert look(folder, max_model_len=256) == {}
    assert "short-rotary-table" in look(folder.change(max_position_embeddings=128))


def test_c9_norm_weights_without_their_flag_and_the_flag_without_weights(make_folder, look):
    """vllm#38111: the flag did not reach the model, so a trained norm was skipped."""
    folder = make_folder(fc_norm=True)
    found = look(folder.change(fc_norm=False))["tensor-unknown"]
    assert found.severity == "error" and "fc_norm" in found.title
    assert "tensor-missing" in look(make_folder("plain").change(norm_before_fc=True))


def test_c9_old_names_that_vllm_does_not_read(make_folder, look):
    folder = make_folder(fc_norm=True)
    renamed = {f"aux_norm_{n}__weight": folder.tensors[f"fc_norm.{i}.weight"]
               for i, n in enumerate(("low", "mid", "high"))}  # fmt: skip
    folder.put(*(f"fc_norm.{i}.weight" for i in range(3)), **renamed)
    folder.change(fc_norm=None, use_aux_norm=True)
    assert set(look(folder)) == {"vllm-old-names"}
    assert look(folder, "sglang") == {}
    assert "use_aux_norm" in look(folder)["vllm-old-names"].title


def test_c10_nested_ids_are_not_read_by_vllms_second_runner(make_folder, look):
    """1.2 % acceptance instead of 58.9 %: the V2 runner takes the defaults, and says nothing."""
    folder = make_folder().change(**{IDS: None, "eagle_config": {IDS: [3, 5, 8]}})
    found = look(folder, "vllm")["layer-ids-misread"]
    assert found.severity == "error"
    assert "vllm-v2 takes states [2, 5, 7], the ids mean [4, 6, 9] or [3, 5, 8]" in found.title


def test_c10_output_ids_in_the_nested_place_are_read_one_off_by_vllms_first(make_folder, look):
    folder = make_folder().change(**{IDS: None, "eagle_config": {IDS: [1, 4, 6]}})
    found = look(folder, "vllm")["layer-ids-misread"]
    assert "vllm-v1 takes states [1, 4, 6], the ids mean [2, 5, 7]" in found.title
    assert set(look(folder, "sglang")) == {"layer-ids-nested"}


def test_c10_before_layer_ids_alone_are_defaults_for_sglang(make_folder, look):
    folder = make_folder(slots=(3, 5, 8)).change(eagle_config=None)
    assert look(folder, "vllm") == {}
    found = look(folder, "sglang")["layer-ids-misread"]
    assert "sglang takes states [2, 5, 7], the ids mean [3, 5, 8]" in found.title


def test_c10_ids_that_contradict_each_other(make_folder, look):
    folder = make_folder().change(eagle_config={IDS: [0, 1, 2]})
    assert look(folder)["unreadable"].severity == "error"


def test_kimi_public_ids_are_right_for_deepseek_targets_and_off_by_one_for_llama(
    make_folder, look, tiny_target
):
    """[2, n/2, n-3] nested: SGLang's DeepSeek classes take it as it is, its Llama class adds 1."""
    folder = make_folder().change(**{IDS: None, "eagle_config": {IDS: [2, 5, 7]}})
    kimi = changed_target(tiny_target, model_type="kimi_k2")
    assert "layer-ids-misread" not in look(folder, "sglang", target=kimi)
    assert "[3, 6, 8]" in look(folder, "sglang")["layer-ids-misread"].title


def test_c12_a_tied_head_of_another_size(make_folder, look):
    found = look(make_folder().change(tie_word_embeddings=True))["unreadable"]
    assert found.severity == "error" and "tie_word_embeddings" in found.title


def test_c14_a_plain_drafter_under_an_int4_target(make_folder, look, tiny_target):
    """sglang#28196: the drafter is loaded as if it were quantised."""
    int4 = changed_target(
        tiny_target, quantization_config={"quant_method": "compressed-tensors", "format": "int4"}
    )
    folder = make_folder()
    found = look(folder, target=int4)["sglang-inherits-quantisation"]
    assert "compressed-tensors" in found.title and "unquant" in found.remedy
    assert look(folder, "vllm", target=int4) == {}
    facts = examine(folder.path, int4, ask=None).facts
    assert facts["vllm-v1"]["quantisation"] == "none"
    assert facts["sglang"]["quantisation"].startswith("the target's, inherited")


def test_v1_absolute_ids_in_d2t(make_folder, look):
    folder = make_folder()
    absolute = folder.tensors["d2t"] + torch.arange(90)
    found = look(folder.put(d2t=absolute))["vocab-map"]
    assert found.severity == "error" and "absolute" in found.title
    assert look(folder.put(d2t=folder.drafter.d2t.to(torch.int32)))["vocab-map"].title == (
        "d2t is torch.int32"
    )
    folder.put("t2d", d2t=folder.drafter.d2t.float())
    assert "float32" in look(folder)["vocab-map"].title


def test_v2_a_reduced_vocabulary_without_a_map(make_folder, look):
    """Automodel#2447: the map lay in a side file; engines took ids 0..D-1, in silence."""
    found = look(make_folder().put("d2t", "t2d"))
    assert found["vocab-map-missing"].severity == "error"


def test_v3_the_first_ids_are_no_choice_and_coverage_is_counted(make_folder, look, tmp_path):
    t2d = torch.arange(300) < 90
    folder = make_folder().put(d2t=torch.zeros(90, dtype=torch.int64), t2d=t2d)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i}" for i in range(50, 150)))
    found = look(folder, text=text)
    assert "first 90 of 300" in found["vocab-map-first-ids"].title
    assert "40.0%" in found["vocab-coverage"].title
    text.write_text("w5 w6 w7")
    assert set(look(folder, text=text)) == {"vocab-map-first-ids"}


def test_fc_of_four_slots_with_three_ids(make_folder, look):
    folder = make_folder(slots=(1, 2, 5, 7))
    folder.change(**{IDS: [2, 5, 7], "eagle_config": None})
    found = look(folder)
    assert "takes 4 states, the config names 3" in found["slot-count"].title
    assert "(64, 256), expected (64, 192)" in found["tensor-shape"].title


def test_weights_of_several_dtypes(make_folder, look):
    folder = make_folder()
    folder.put(norm__weight=folder.tensors["norm.weight"].half())
    assert "float16" in look(folder)["mixed-dtypes"].title


def test_a_speculators_folder_is_no_folder_for_sglang(make_folder, look, tiny_target, tmp_path):
    from eagle3lib.drafter.convert import convert_drafter

    source = make_folder()
    source.path = convert_drafter(source.path, tmp_path / "s", "speculators", tiny_target)
    assert set(look(source)) == {"style-not-read"}
    assert look(source, "vllm") == {}


def test_what_sglang_ignores_is_an_error_where_sglang_alone_is_asked_for(make_folder, look):
    folder = make_folder(norm_before_residual=True)
    assert look(folder)["sglang-norm-before-residual"].severity == "warning"
    assert look(folder, "sglang")["sglang-norm-before-residual"].severity == "error"
    assert look(folder, "vllm") == {}


def test_a_folder_of_configs_alone_is_still_examined(make_folder, tiny_target):
    folder = make_folder()
    (folder.path / "model.safetensors").unlink()
    found = examine(folder.path, tiny_target, ask=None)
    assert [f.title for f in found.findings] == ["the drafter has no weights"]
    assert found.facts["sglang"]["positions"] == "256"


# What engines answer


def answer(**said):
    whole = {"version": "9.9", "class": "M", "architecture": "A", "target_eagle3": True}
    return lambda engine, *_: Answer(engine, whole | said, slots=said.get("slots", {}))


def test_the_engines_own_answer_stands_above_the_rules(make_folder, look, tiny_target):
    """A later version that reads other states than our table says."""
    folder = make_folder()
    other = answer(slots={"vllm-v1": [3, 5, 8], "vllm-v2": [2, 5, 7]})
    found = look(folder, "vllm", ask=other)
    assert "vllm-v1 9.9 takes states [3, 5, 8]" in found["rules-out-of-date"].title
    assert "vllm-v1 takes states [3, 5, 8]" in found["layer-ids-misread"].title
    assert examine(folder.path, tiny_target, "vllm", ask=other).facts["vllm-v2"]["source"] == (
        "asked 9.9"
    )


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"refused": "no such config"}, "engine-refuses"),
        ({"class": None}, "engine-architecture"),
        ({"target_eagle3": False}, "engine-target"),
    ],
)
def test_what_an_engine_refuses_is_an_error(make_folder, look, said, code):
    assert look(make_folder(), "vllm", ask=answer(**said))[code].severity == "error"


def test_an_engine_that_is_not_installed_is_told_as_a_note(make_folder, look, monkeypatch):
    monkeypatch.delenv("EAGLE3_SGLANG_PYTHON", raising=False)
    found = look(make_folder(), "sglang", ask=ask_engine)["engine-not-asked"]
    assert found.severity == "note" and "rules of 0.5.23" in found.title


SGLANG = {
    "__init__": "__version__ = '0.5.99'",
    "srt/__init__": "", "srt/models/__init__": "",
    "srt/models/registry": """
class Llama:
    def set_eagle3_layers_to_capture(self, ids=None):
        if not self.pp_group.is_last_rank:
            return
        self.capture_aux_hidden_states = True
        n = self.config.num_hidden_layers
        self.model.layers_to_capture = [i + 1 for i in ids] if ids else [2, n // 2, n - 3]

class LlamaForCausalLMEagle3:
    pass

class ModelRegistry:
    models = {"LlamaForCausalLM": Llama, "LlamaForCausalLMEagle3": LlamaForCausalLMEagle3}

    @classmethod
    def get_supported_archs(cls):
        return list(cls.models)
""",
}  # fmt: skip


@pytest.fixture
def stub_sglang(tmp_path, monkeypatch):
    """A Python whose sglang has the shape of the real registry."""
    for name, text in SGLANG.items():
        file = tmp_path / "site" / "sglang" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("EAGLE3_SGLANG_PYTHON", str(python))
    return tmp_path / "site" / "sglang"


def test_sglangs_target_class_is_asked_which_states_it_captures(
    make_folder, tiny_target, stub_sglang
):
    folder = make_folder()
    got = ask_engine("sglang", folder.path, tiny_target.folder)
    assert got.slots == {"sglang": [2, 5, 7]} and got.said["class"] == "LlamaForCausalLMEagle3"
    assert examine(folder.path, tiny_target, "sglang").findings == []
    folder.change(architectures=["Nobody"])
    assert "Nobody" in ask_engine("sglang", folder.path, tiny_target.folder).said["refused"]


def test_an_engine_that_hangs_or_dies_is_not_waited_for(make_folder, tiny_target, stub_sglang):
    folder = make_folder()
    (stub_sglang / "__init__.py").write_text("raise ImportError('no libcuda')")
    got = ask_engine("sglang", folder.path, tiny_target.folder)
    assert got.said is None and "no libcuda" in got.why_not
    (stub_sglang / "__init__.py").write_text("import time; time.sleep(60)")
    got = ask_engine("sglang", folder.path, tiny_target.folder, deadline_s=1.0)
    assert got.why_not == "no answer within 1 s"


@pytest.mark.engine
def test_vllms_own_code_reads_what_we_wrote(make_folder, tiny_target):
    """Its SpeculativeConfig and the id functions of both its runners, for our folder and for ids in
    the nested place alone: what the rules say is what it does."""
    folder = make_folder(slots=(3, 5, 8))
    found = examine(folder.path, tiny_target, "vllm")
    assert found.findings == []
    assert all(f["source"].startswith("asked") for f in found.facts.values())
    folder.change(**{IDS: None, "eagle_config": {IDS: [3, 5, 8]}})
    slots = ask_engine("vllm", folder.path, tiny_target.folder).slots
    assert slots == {"vllm-v1": [3, 5, 8], "vllm-v2": None}


@pytest.mark.engine
def test_the_document_tells_what_the_installed_vllm_answers():
    """Of another version the document speaks until it is written again."""
    version, table = probe_table()
    text = DOCUMENT.read_text()
    assert f"vLLM {version}, asked:\n\n{table}" in text, "python -m eagle3lib.drafter.formats_table"


# The command


def test_the_command_prints_what_is_read_and_exits_1_on_errors(eagle3, make_folder, tiny_target):
    folder = make_folder()
    words = ["doctor", folder.path, "--target", tiny_target.folder, "--no-ask"]
    code, out, _ = eagle3(*words)
    assert code == 0 and "[2, 5, 7], outputs of layers 1, 4, 6" in out and "0 findings" in out
    folder.put("norm.weight")
    code, out, _ = eagle3(*words, "--json")
    told = json.loads(out)
    assert code == 1 and told["failed"]
    assert [f["code"] for f in told["findings"]] == ["tensor-missing"]
    code, _, err = eagle3(*words, "--engine", "trt")
    assert code == 2 and "no engine 'trt'" in err and "Traceback" not in err


def test_an_mla_folder_is_examined_too(make_folder, look, tiny_target):
    mla = {"mla": MLA(24, 20, 12, 8, 10), "head_dim": 20, "num_key_value_heads": 4}
    assert look(make_folder(**mla)) == {}
    found = look(make_folder("n", **mla, norm_before_fc=True))
    assert found["mla-norm-before-fc"].severity == "error"
