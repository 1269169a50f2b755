"""The run folder: when a phase is done, resumed or made again, and what is never touched."""

import json

import pytest

from eagle3lib.lab import manifest, run
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import hash_file, read_json, write_json
from eagle3lib.lab.params import (
    BenchmarkParams,
    CaptureParams,
    GenerateParams,
    PlanParams,
    VocabParams,
)
from eagle3lib.lab.run import begin, check_run_target, gather_inputs, phase_state, run_folder

TARGET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch):
    """Runs of this test alone; notebooks of a folder of its own, which the test may write."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(run, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    return tmp_path / "outputs"


def state(params, target=TARGET):
    return phase_state(params, gather_inputs(params, target))


def complete(params, content="artefact", target=TARGET):
    """Run a phase as a notebook does."""
    phase = begin(params, target)
    path = phase.folder / "result.bin"
    path.write_text(content)
    phase.finish({"answers": 1}, [path])
    return phase


def tree_hash(folder):
    return {
        str(p.relative_to(folder)): hash_file(p) if p.is_file() else "" for p in folder.rglob("*")
    }


@pytest.fixture
def generate(tmp_path):
    """Parameters of a phase that has both parameters and input files."""
    (tmp_path / "w.jsonl").write_text("workload")
    (tmp_path / "g.jsonl").write_text("general")
    return GenerateParams(
        run="mine", workload=str(tmp_path / "w.jsonl"), general=str(tmp_path / "g.jsonl")
    )


def changed(params, **values):
    return type(params).checked({**params.model_dump(), **values}, "test")


def test_new_then_interrupted_then_done(generate):
    assert state(generate)[0] == "new"
    phase = begin(generate, TARGET)
    assert state(generate) == ("resume", "was interrupted")
    artefact = phase.folder / "a.txt"
    artefact.write_text("a")
    assert phase.finish({"n": 1}, [artefact]) == {"n": 1}
    assert state(generate)[0] == "done"
    assert read_json(phase.folder / "metrics.json") == {"n": 1}


def test_a_phase_that_runs_again_is_not_done_until_it_finishes(generate):
    phase = complete(generate)
    begin(generate, TARGET)
    assert state(generate)[0] == "resume"
    assert (phase.folder / "result.bin").exists()  # what it resumes from


def test_the_manifest_is_written_last(generate, monkeypatch):
    """Its existence means that the phase is whole, so nothing of the phase may come after it."""
    written = []
    write = run.write_json

    def record(path, value):
        written.append(path)
        write(path, value)

    for room in (run, manifest):
        monkeypatch.setattr(room, "write_json", record)
    phase = complete(generate)
    own = [p.name for p in written if p.parent == phase.folder]
    assert own[0] == "inputs.json" and own[-1] == "manifest.json"


def test_a_changed_parameter_is_stale_and_named_with_both_values(generate):
    complete(generate)
    found, why = state(changed(generate, max_new_tokens=17))
    assert found == "stale" and f"max_new_tokens {generate.max_new_tokens} -> 17" in why


def test_every_parameter_but_the_runs_name_makes_a_phase_stale():
    plan = PlanParams()
    inputs = gather_inputs(plan, TARGET)
    for name, value in plan.model_dump().items():
        other = f"{value}x" if isinstance(value, str) else value + 1
        changed_one = plan.model_copy(update={name: other})
        assert (gather_inputs(changed_one, TARGET) == inputs) == (name == "run"), name


def test_a_changed_input_file_is_stale_and_named(generate, tmp_path):
    complete(generate)
    (tmp_path / "w.jsonl").write_text("workloae")
    assert state(generate) == ("stale", "the file of workload changed")


def finished_before(params):
    """The phases that ``params``' phase reads."""
    for name in params.UPSTREAM:
        told = {"fingerprint": name, "artefacts": {}, "finished": "", "duration_s": 1, "inputs": {}}
        told["inputs"] = {"params": {}, "upstream": {}}
        write_json(run_folder(params.run) / name / "manifest.json", told)


def test_a_changed_reference_drafter_reruns_the_benchmark(tmp_path, monkeypatch):
    """It is an arm, so another one under the same name is another benchmark."""
    folder = tmp_path / "known-good"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    params = BenchmarkParams(run="mine", reference_drafter=str(folder))
    finished_before(params)
    complete(params)
    assert state(params)[0] == "done"
    (folder / "model.safetensors").write_bytes(b"weightt")
    assert state(params) == ("stale", "the file of reference_drafter changed")


def test_a_second_opinion_that_fails_is_left_out_without_measuring_anew():
    """``bench_serve=false`` is the remedy of its errors, after hours of answers."""
    params = BenchmarkParams(run="mine", repeats=3)
    finished_before(params)
    begin(changed(params, bench_serve=True), TARGET)
    assert state(params)[0] == "resume" == state(changed(params, bench_serve=True, repeats=4))[0]
    assert state(changed(params, repeats=2))[0] == "stale"
    assert state(changed(params, compile=True))[0] == "stale"


def test_a_missing_input_file_is_a_user_error_that_names_parameter_and_path(generate, tmp_path):
    (tmp_path / "g.jsonl").unlink()
    with pytest.raises(UserError, match=r"'general'(?s:.)*g\.jsonl"):
        begin(generate, TARGET)


def notebook(tmp_path, phase, code, parameters="run = 'demo'", text="# Title"):
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": [text]},
        {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": [parameters]},
        {"cell_type": "code", "metadata": {}, "source": [code]},
    ]
    path = tmp_path / "notebooks" / f"{phase}.ipynb"
    path.write_text(json.dumps({"cells": cells}))


def test_a_changed_notebook_is_stale_but_its_text_and_parameters_cell_are_free(generate, tmp_path):
    notebook(tmp_path, generate.PHASE, "answer()")
    complete(generate)
    notebook(tmp_path, generate.PHASE, "answer()", "run = 'x'", "# Better title")
    assert state(generate)[0] == "done"
    notebook(tmp_path, generate.PHASE, "answer(2)")
    assert state(generate) == ("stale", "the notebook changed")


@pytest.mark.parametrize("damage", [lambda p: p.write_text("arte"), lambda p: p.unlink()])
def test_a_truncated_or_missing_artefact_is_made_again(generate, damage):
    phase = complete(generate)
    damage(phase.folder / "result.bin")
    found, why = state(generate)
    assert found == "resume" and "result.bin" in why


def test_resuming_keeps_the_folder_and_starting_afresh_sets_it_aside(generate):
    phase = begin(generate, TARGET)
    (phase.folder / "answers.jsonl").write_text("kept")
    begin(generate, TARGET)
    assert (phase.folder / "answers.jsonl").read_text() == "kept"

    begin(changed(generate, max_new_tokens=17), TARGET)
    assert not (phase.folder / "answers.jsonl").exists()
    previous = phase.folder.with_name("01_generate_data.previous")
    assert (previous / "answers.jsonl").read_text() == "kept"
    assert read_json(previous / "inputs.json") == phase.inputs


def test_only_the_last_stale_folder_is_kept_and_hidden_states_never(generate):
    for tokens in (17, 18, 19):
        phase = begin(changed(generate, max_new_tokens=tokens), TARGET)
        (phase.folder / f"made_by_{tokens}").write_text("")
        (phase.folder / "states").mkdir()
    siblings = {p.name for p in phase.folder.parent.iterdir() if p.is_dir()}
    assert siblings == {"01_generate_data", "01_generate_data.previous"}
    previous = phase.folder.with_name("01_generate_data.previous")
    assert (previous / "made_by_18").exists() and not (previous / "states").exists()


def test_of_a_run_and_another_target_both_are_named(generate):
    complete(generate)
    check_run_target("mine", generate.target, TARGET)
    check_run_target("not-begun", generate.target, "another")
    with pytest.raises(UserError, match=f"(?s)has changed since run 'mine'.*{TARGET}, found an"):
        check_run_target("mine", generate.target, "another")
    with pytest.raises(
        UserError, match=f"(?s)'{generate.target}', not to 'theirs'.*next: *the target sm"
    ):
        check_run_target("mine", "theirs", "another")


def test_a_run_of_another_target_is_refused_and_nothing_in_it_changed(generate):
    complete(generate)
    before = tree_hash(run_folder("mine"))
    with pytest.raises(UserError) as caught:
        begin(changed(generate, max_new_tokens=17), "another-target")
    assert tree_hash(run_folder("mine")) == before
    assert TARGET in str(caught.value) and "another-target" in str(caught.value)
    assert "run=" in str(caught.value)  # what to do: choose another name
    begin(changed(generate, run="other"), "another-target")


def test_an_unfinished_upstream_phase_is_a_user_error_that_names_it(generate):
    capture = CaptureParams(run="mine")
    with pytest.raises(UserError, match="needs 01_generate_data"):
        begin(capture, TARGET)
    begin(generate, TARGET)  # started is not finished
    with pytest.raises(UserError, match="needs 01_generate_data"):
        begin(capture, TARGET)
    assert not (run_folder("mine") / capture.PHASE).exists()
    complete(generate)
    assert begin(capture, TARGET).of("01_generate_data") == run_folder("mine") / "01_generate_data"


def test_downstream_is_stale_when_upstream_gave_another_result_and_only_then(generate):
    vocab = VocabParams(run="mine")
    complete(generate, "first")
    complete(vocab)
    complete(generate, "first")
    assert state(vocab)[0] == "done"
    complete(generate, "second")
    assert state(vocab) == ("stale", "01_generate_data was made again")


def test_the_runs_manifest_lists_the_phases_that_are_done(generate):
    complete(generate)
    begin(VocabParams(run="mine"), TARGET)
    manifest = read_json(run_folder("mine") / "manifest.json")
    assert list(manifest["phases"]) == ["01_generate_data"]
    assert manifest["phases"]["01_generate_data"]["bytes"] == len("artefact")
    assert manifest["target"] == {"name": generate.target, "fingerprint": TARGET}
    begin(generate, TARGET)
    assert read_json(run_folder("mine") / "manifest.json")["phases"] == {}


def test_progress_is_on_disk_while_a_phase_runs_and_gone_when_it_is_done(generate):
    phase = begin(generate, TARGET)
    path = phase.folder / "progress.json"
    with pytest.raises(RuntimeError), phase.progress(10, "rows", "answers", done=4) as bar:
        bar.update(3)
        raise RuntimeError("died")
    assert (read_json(path)["done"], read_json(path)["total"]) == (7, 10)
    phase.finish({})
    assert not path.exists()


def test_a_phase_whose_upstream_was_made_again_is_out_of_date(generate):
    """Running one phase alone must not leave a page that shows old figures as if they were new."""
    folder = run_folder("mine")
    complete(generate)
    complete(VocabParams(run="mine"))
    assert run.outdated_by(folder, "03_build_vocab_map") == []
    complete(generate, content="other answers")
    assert run.outdated_by(folder, "03_build_vocab_map") == ["01_generate_data"]
    complete(VocabParams(run="mine"))
    assert run.outdated_by(folder, "03_build_vocab_map") == []


def test_prompts_may_be_a_folder_or_come_from_the_hub(generate, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "data.arrow").write_text("a")
    of_a_folder = changed(generate, workload=str(folder), general="hub:ORG/NAME")
    complete(of_a_folder)
    assert state(of_a_folder)[0] == "done"
    (folder / "data.arrow").write_text("b")
    assert state(of_a_folder) == ("stale", "the file of workload changed")
    assert state(changed(of_a_folder, general="hub:ORG/OTHER"))[0] == "stale"


def test_parameters_that_decide_nothing_rerun_nothing(generate):
    complete(generate)
    for values in ({"server": "http://x:1"}, {"concurrency": 2}, {"max_reject_share": 1.0}):
        assert state(changed(generate, **values))[0] == "done"


def test_more_of_what_is_kept_continues_and_less_starts_afresh(generate):
    """An answer file of 15,000 tokens is the beginning of one of 20,000."""
    complete(generate)
    more = changed(generate, answer_tokens=generate.answer_tokens + 5000)
    assert state(more) == ("resume", "answer_tokens 15000 -> 20000")
    phase = begin(more, TARGET)
    assert (phase.folder / "result.bin").exists()
    assert state(changed(generate, answer_tokens=10))[0] == "stale"
    assert state(changed(more, temperature=1.0))[0] == "stale"


def test_two_processes_do_not_run_one_phase(generate, tmp_path):
    """The lock is the process's: the same kernel may begin again, another one may not."""
    import subprocess
    import sys

    held = begin(generate, TARGET)
    again = begin(generate, TARGET)
    script = (
        "from eagle3lib.lab import run\n"
        "from pathlib import Path\n"
        f"run.ROOT = Path({str(tmp_path)!r})\n"
        "from eagle3lib.lab.params import GenerateParams\n"
        f"run.begin(GenerateParams(**{generate.model_dump()!r}), {TARGET!r})\n"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "is running in another process" in other.stderr
    assert held.folder == again.folder
