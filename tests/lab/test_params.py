"""Parameters: every mistake is one ``UserError`` that names the thing, no pydantic traceback."""

import re
from html import unescape
from typing import Literal, get_origin

import pytest

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.params import PHASES, BenchmarkParams, GenerateParams, TrainParams
from eagle3lib.lab.phase_params import SOURCES_VARIABLE, resolve

FIELDS = [(model, name) for model in PHASES.values() for name in model.model_fields]


def refused(model, **values):
    """The text of the one error that ``values`` cause; it must read as ours, not as pydantic's."""
    with pytest.raises(UserError) as caught:
        model.checked(values, "profile.yaml")
    text = str(caught.value)
    assert "profile.yaml" in text and model.PHASE in text
    assert "validation error" not in text and "pydantic" not in text
    # `from None`: the notebook's reader must not see pydantic's error above ours.
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None
    return text


def test_an_unknown_parameter_is_named_and_the_known_ones_listed():
    text = refused(TrainParams, epoch=3)
    assert "'epoch'" in text and "epochs" in text and "learning_rate" in text


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        (TrainParams, "epochs", "many"),
        (TrainParams, "epochs", 1.5),
        (TrainParams, "epochs", None),
        (TrainParams, "epochs", [3]),
        (TrainParams, "precision", "int4"),
        (GenerateParams, "workload", 3),
        (GenerateParams, "target", {"name": "x"}),
    ],
)
def test_a_wrong_type_is_named_with_what_was_found(model, name, value):
    text = refused(model, **{name: value})
    assert repr(name) in text and repr(value) in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("steps", 17),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        # No JSON can hold it: it would break the manifest, hours later.
        ("learning_rate", float("inf")),
        ("step_weight", 1.01),
        ("seed", -1),
    ],
)
def test_a_value_out_of_range_is_named(name, value):
    text = refused(TrainParams, **{name: value})
    assert repr(name) in text and repr(value) in text


def test_every_problem_is_a_line_of_one_error():
    text = refused(TrainParams, epochs=0, sede=1, precision="int4")
    assert all(repr(name) in text for name in ("epochs", "sede", "precision"))


@pytest.mark.parametrize(
    "run", ["a/b", "../up", "/abs", "", ".", "..", ".hidden", "a b", "a\n", "examples", "reference"]
)
def test_a_run_name_that_is_no_plain_folder_name_is_refused(run):
    assert "'run'" in refused(TrainParams, run=run)


@pytest.mark.parametrize("run", ["demo", "qwen3-8b_k5.2", "2026"])
def test_a_plain_run_name_is_taken(run):
    assert TrainParams.checked({"run": run}, "x").run == run


@pytest.mark.parametrize("model", PHASES.values(), ids=PHASES)
def test_a_notebooks_cell_gives_back_the_parameters(model):
    """Names of the namespace that are no parameters (imports, helpers) play no part."""
    cell = model().model_dump(mode="json")
    assert model.from_notebook({**cell, "np": object(), "_": 3}) == model()


def test_a_parameters_cell_that_lacks_a_field_is_refused_by_name():
    cell = TrainParams().model_dump(mode="json")
    del cell["seed"]
    with pytest.raises(UserError, match=r"lacks: seed(?s:.)*04_train_drafter\.ipynb"):
        TrainParams.from_notebook(cell)


@pytest.mark.parametrize(("model", "name"), FIELDS, ids=lambda x: getattr(x, "PHASE", x))
def test_every_field_can_stand_in_a_papermill_cell(model, name):
    """papermill reads the cell by a line regex: '=' in the help drops the line, '#' cuts it."""
    field = model.model_fields[name]
    assert field.description, f"{name} has no help"
    assert not re.search(r"[=#\n]", field.description)
    assert field.annotation in (str, int, float, bool) or get_origin(field.annotation) is Literal
    # `field = value  # help` is one line only while the default is plain.
    assert type(field.default) in (str, int, float, bool) and "#" not in str(field.default)


def test_the_defaults_of_every_phase_are_valid():
    for model in PHASES.values():
        assert model.checked(model().model_dump(mode="json"), "defaults") == model()


def test_phases_are_in_order_and_need_only_earlier_ones():
    names = list(PHASES)
    assert names == sorted(names)
    for index, model in enumerate(PHASES.values()):
        assert set(model.UPSTREAM) <= set(names[:index])
        assert set(model.FILES) <= set(model.model_fields)


def test_input_files_are_found_from_the_repository_and_empty_ones_left_out(tmp_path):
    cfg = GenerateParams(workload="params/some.jsonl", general="")
    assert cfg.input_files() == {"workload": ROOT / "params/some.jsonl"}
    assert resolve(str(tmp_path)) == tmp_path


def test_several_answers_to_a_prompt_need_a_temperature():
    with pytest.raises(UserError, match=r"answers_per_prompt(?s:.)*temperature"):
        GenerateParams.checked({"answers_per_prompt": 2}, "here")
    assert GenerateParams(answers_per_prompt=2, temperature=0.7).answers_per_prompt == 2


def test_yaml_reads_on_as_true_and_thinking_takes_it():
    assert GenerateParams(thinking=True).thinking == "on"
    assert GenerateParams(thinking=False).thinking == "off"
    with pytest.raises(UserError, match="thinking"):
        GenerateParams.checked({"thinking": "sometimes"}, "here")


def test_addresses_are_parted_by_commas():
    cfg = GenerateParams(server=" http://a:1/, http://b:2 ,,http://a:1")
    assert cfg.servers() == ["http://a:1", "http://b:2"]
    assert GenerateParams().servers() == []


def test_a_notebook_shows_each_parameter_with_its_help_and_where_it_came_from(monkeypatch):
    values = {name: field.default for name, field in TrainParams.model_fields.items()}
    in_the_lab = TrainParams.from_notebook(values | {"epochs": 3})
    told = {line["parameter"]: line["from"] for line in in_the_lab.table()}
    assert told == dict.fromkeys(values, "default") | {"epochs": "this notebook"}
    monkeypatch.setenv(SOURCES_VARIABLE, '{"steps": "mine.yaml, common", "epochs": "command line"}')
    headless = TrainParams.from_notebook(values | {"epochs": 3})
    told = {line["parameter"]: line["from"] for line in headless.table()}
    assert (told["steps"], told["epochs"], told["loss"]) == (
        "mine.yaml, common", "command line", "default",
    )  # fmt: skip
    shown = headless._repr_html_()
    assert all(field.description in unescape(shown) for field in TrainParams.model_fields.values())
    assert "<b>" not in TrainParams(warm_start="<b>")._repr_html_()


def test_one_number_stands_for_a_list_of_one():
    """``eagle3 run demo 06 concurrency=8``: YAML reads a number."""
    told = BenchmarkParams.checked({"concurrency": 8, "temperatures": 0.7}, "the command line")
    assert (told.concurrency, told.temperatures) == ("8", "0.7")
    with pytest.raises(UserError, match="concurrency"):
        BenchmarkParams.checked({"concurrency": True}, "the command line")
    long = {"context_tokens": 1_048_576, "temperatures": 0.1234567, "concurrency": 2.0}
    told = BenchmarkParams.checked(long | {"max_model_len": 2_000_000}, "the command line")
    assert (told.context_tokens, told.temperatures, told.concurrency) == (
        "1048576", "0.1234567", "2",
    )  # fmt: skip
    for wrong in (float("nan"), float("inf"), True):
        with pytest.raises(UserError, match="temperatures"):
            BenchmarkParams.checked({"temperatures": wrong}, "the command line")
