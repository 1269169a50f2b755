"""Profiles and overrides: what applies to which phase, and what is refused by name."""

import pytest

from eagle3lib.lab import profile
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.profile import find_profile, load_profile, parse_arguments, phase_name

TRAIN, BENCH, GENERATE = "04_train_drafter", "06_benchmark_serving", "01_generate_data"


@pytest.fixture
def load(tmp_path):
    """Write a profile and load it with the words of a command line."""

    def load(text="", *words):
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        phases, overrides = parse_arguments(list(words))
        return load_profile(str(path), phases, overrides)

    return load


def defaults(phase):
    return PHASES[phase]()


def test_an_empty_profile_gives_the_defaults(load):
    assert load("") == {name: model() for name, model in PHASES.items()}


def test_common_applies_wherever_the_field_exists(load):
    result = load("common: {run: mine, max_model_len: 4096}")
    for name, model in PHASES.items():
        assert result[name].run == "mine"
        if "max_model_len" in model.model_fields:
            assert result[name].max_model_len == 4096
    assert "max_model_len" not in PHASES[TRAIN].model_fields  # so the law was put to the test


def test_a_section_wins_over_common_and_the_command_line_over_both(load):
    text = "common: {num_speculative_tokens: 4}\n06_benchmark_serving: {num_speculative_tokens: 5}"
    assert load(text)[TRAIN].num_speculative_tokens == 4
    assert load(text)[BENCH].num_speculative_tokens == 5
    assert load(text, "06.num_speculative_tokens=6")[BENCH].num_speculative_tokens == 6


def test_a_dotted_override_reaches_its_phase_alone(load):
    result = load("", "04.num_speculative_tokens=7")
    assert result[TRAIN].num_speculative_tokens == 7
    assert result[BENCH] == defaults(BENCH)
    assert result == load("", f"{TRAIN}.num_speculative_tokens=7")


def test_a_plain_override_applies_to_the_chosen_phases(load):
    """Downstream of what is run, another phase's number must not move: it would make it stale."""
    result = load("", "06", "num_speculative_tokens=7")
    assert result[BENCH].num_speculative_tokens == 7
    assert result[TRAIN] == defaults(TRAIN)


def test_a_plain_override_without_phases_applies_to_all_that_have_it(load):
    result = load("", "max_new_tokens=32")
    assert result[GENERATE].max_new_tokens == result[BENCH].max_new_tokens == 32


def test_run_and_target_apply_to_every_phase_whatever_was_chosen(load):
    result = load("common: {run: old}", "04", "run=new", "target=/models/x")
    assert {p.run for p in result.values()} == {"new"}
    assert {p.target for p in result.values()} == {"/models/x"}


@pytest.mark.parametrize(
    ("text", "words", "named"),
    [
        ("nope: {}", [], "'nope'"),
        ("4_train: {epochs: 3}", [], "'4_train'"),
        ("common: {epoch: 3}", [], "'epoch'"),
        ("04_train_drafter: {epoch: 3}", [], "'epoch'"),
        ("04_train_drafter: 3", [], "'04_train_drafter'"),
        ("- 1", [], "mapping"),
        ("a: [", [], "YAML"),
        ("04_train_drafter: {epochs: many}", [], "'epochs'"),
        ("04_train_drafter: {epochs: 0}", [], "'epochs'"),
        ("common: {run: a/b}", [], "'run'"),
        ("", ["run=a/b"], "'run'"),
        ("", ["04.epochs=many"], "'epochs'"),
        ("", ["04.epoch=3"], "'epoch'"),
        ("", ["epoch=3"], "'epoch'"),
        ("", ["08.epochs=3"], "'08'"),
        ("", ["08"], "'08'"),
        ("", ["train"], "'train'"),
        ("", ["epochs=[1"], "'epochs=[1'"),
        # Known elsewhere, but not a parameter of what is to run: it would do nothing.
        ("", ["06", "epochs=3"], "'epochs'"),
    ],
)
def test_a_mistake_is_one_user_error_that_names_it(load, text, words, named):
    with pytest.raises(UserError) as caught:
        load(text, *words)
    assert named in str(caught.value) and "validation error" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "04_train_drafter: {run: other}",
        "04_train_drafter: {target: other}",
        # A run named as its target hid the third name once: both were counted in one set.
        "common: {run: x, target: x}\n04_train_drafter: {run: y}",
        "common: {run: x, target: x}\n04_train_drafter: {target: y}",
    ],
)
def test_phases_of_different_runs_or_targets_are_refused(load, text):
    with pytest.raises(UserError, match="different runs or targets"):
        load(text)


def test_values_are_yaml_scalars_and_phases_come_sorted_once():
    phases, overrides = parse_arguments(
        ["06", "04.epochs=3", "04", "06", "server=", "compile=true"]
    )
    assert phases == [TRAIN, BENCH]
    assert overrides == {"04.epochs": 3, "server": "", "compile": True}


def test_an_equals_sign_in_a_value_belongs_to_the_value():
    assert parse_arguments(["server=http://h/?a=b"])[1] == {"server": "http://h/?a=b"}


def test_a_learning_rate_in_plain_exponent_form_is_a_number(load):
    """YAML 1.1 reads ``1e-3`` (no dot) as text."""
    assert load("", "04.learning_rate=1e-3")[TRAIN].learning_rate == 1e-3


def test_a_phase_is_its_number_or_its_name():
    for name in PHASES:
        assert phase_name(name) == phase_name(name[:2]) == name
    with pytest.raises(UserError, match="unknown phase ''"):
        phase_name("")


def test_a_missing_profile_names_itself_and_the_known_ones(tmp_path, monkeypatch):
    (tmp_path / "known.yaml").write_text("")
    monkeypatch.setattr(profile, "PROFILES", tmp_path)
    assert find_profile("known") == tmp_path / "known.yaml"
    with pytest.raises(UserError, match=r"'gone'(?s:.)*known"):
        find_profile("gone")


def test_the_shipped_profiles_load():
    for path in profile.PROFILES.glob("*.yaml"):
        load_profile(path.stem)


def test_a_value_knows_the_section_or_the_command_line_that_set_it(load):
    text = "common: {run: mine, epochs: 2, steps: 7}\n04_train_drafter: {epochs: 3, seed: 1}"
    told = {line["parameter"]: line["from"] for line in load(text, "seed=2")[TRAIN].table()}
    assert (told["run"], told["steps"]) == ("mine.yaml, common",) * 2
    assert told["epochs"] == f"mine.yaml, {TRAIN}"
    assert (told["seed"], told["loss"]) == ("command line", "default")


def test_the_plan_is_of_what_the_phases_are_told(load):
    text = """
01_generate_data: {answer_tokens: 24000, max_model_len: 2048}
02_capture_hidden_states: {state_format: fp8}
03_build_vocab_map: {draft_vocab_size: 8192}
04_train_drafter: {epochs: 3, steps: 7}
06_benchmark_serving: {num_speculative_tokens: 5}
"""
    plan = load(text)["00_plan"]
    assert (plan.answer_tokens, plan.max_model_len, plan.draft_vocab_size) == (24000, 2048, 8192)
    assert (plan.epochs, plan.steps, plan.num_speculative_tokens) == (3, 7, 5)
    assert plan.storage == "fp8"
    told = {line["parameter"]: line["from"] for line in plan.table()}
    assert told["epochs"] == "as in 04_train_drafter" and told["gpus"] == "default"


def test_a_plan_with_a_value_of_its_own_keeps_it(load):
    plan = load("00_plan: {epochs: 9, storage: compact}\n04_train_drafter: {epochs: 3}")["00_plan"]
    assert (plan.epochs, plan.storage) == (9, "compact")
    assert load("common: {states: live}", "00", "epochs=2")["00_plan"].storage == "stream"
    assert load("03_build_vocab_map: {draft_vocab_size: 0}")["00_plan"] == defaults("00_plan")
