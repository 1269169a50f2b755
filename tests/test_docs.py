"""README.md and docs/ against the code: what a stranger is told to type must exist."""

from __future__ import annotations

import ast
import re
import shlex
from importlib.util import find_spec

import pytest
import typer
from doc_commands import ELSEWHERE, MARKS, PAGES, block_commands

from eagle3lib.cli import app
from eagle3lib.engine.settings import ServeParams
from eagle3lib.lab.explore import EXPLORERS
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.profile import load_profile, phase_name
from eagle3lib.report.reference import FOLDER
from eagle3lib.report.reference import PAGES as PAGES_WRITTEN

PARAMETERS = {
    "run": set().union(*(model.model_fields for model in PHASES.values())),
    "plan": set(PHASES["00_plan"].model_fields),
    "serve": set(ServeParams.model_fields),
    "profile": set(ServeParams.model_fields),
    "explore": set().union(*(model.model_fields for model in EXPLORERS.values())),
}
# Findings of `eagle3 doctor`, which the rules only look at.
OF_THE_DOCTOR = {"layer-ids-conflict", "tied-reduced-head", "vocab-map"}
# Typer exports one kind of it alone; click's own or the copy that Typer carries, by its version.
USAGE_ERROR = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "UsageError")
COMMANDS = typer.main.get_command(app).commands
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)


def code_of(text):
    """Indented lines, and what stands in backticks (which may go over two lines)."""
    inline = (span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", text))
    return [*re.findall(r"^ {4,}(.*)$", text, re.MULTILINE), *inline]


def commands_in(text, program):
    """The words after ``program`` at the start of a command, comments left out."""
    for line in code_of(text):
        for found in re.findall(rf"(?:^|, |then )(?:\.venv/bin/)?{program} ([^,]*)", line):
            words = shlex.split(found.replace("|", " "), comments=True)
            if words:
                yield words


def problem(words):
    """What is wrong with the words of an ``eagle3`` command, "" if nothing."""
    name, *rest = words
    if name not in COMMANDS:
        return f"no command {name!r}"
    rest = rest[: rest.index("--")] if "--" in rest else rest
    options = {o for p in COMMANDS[name].params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    for word in rest:
        if word.startswith("--") and word not in options:
            return f"{name} has no option {word!r}"
        parameter = word.partition("=")[0].rpartition(".")[2]
        if "=" in word and parameter not in PARAMETERS.get(name, ()):
            return f"{name} has no parameter {parameter!r}"
        if name in ("run", "params") and re.match(r"\d", word):
            phase_name(word)
    return ""


def unparsed(words):
    """What the command line's own parser says against the words, "" if nothing; nothing is run."""
    name, *rest = words
    try:
        with COMMANDS[name].make_context(name, rest):
            return ""
    except USAGE_ERROR as error:
        return f"{name}: {error.format_message()}"


@each_page
def test_the_command_line_takes_every_command_of_a_block(page):
    """Marked ones too, which no test runs: their options have values of the right kind."""
    commands = [c for c in block_commands(page) if c.words[0] == "eagle3"]
    assert [(c.line, said) for c in commands if (said := unparsed(c.words[1:]))] == []


def test_the_parser_is_asked():
    assert "Missing argument" in unparsed(["note"])
    assert "valid int" in unparsed(["tokens", "FILE", "--row", "three"])
    assert "No such option" in unparsed(["clean", "RUN", "--all"])
    assert not unparsed(["serve", "TARGET", "topk=3", "--", "--any"])


def test_wrong_commands_are_seen():
    found = [
        problem(w) for w in commands_in("    eagle3 ran demo\n`eagle3 stop --every`", "eagle3")
    ]
    assert found == ["no command 'ran'", "stop has no option '--every'"]
    assert problem(["run", "demo", "04", "epochz=3"])
    assert problem(["serve", "TARGET", "topkk=3"])
    assert not problem(["serve", "TARGET", "topk=3", "--", "--any"])


@each_page
def test_every_command_exists(page):
    text = page.read_text(encoding="utf-8")
    wrong = [(words, found) for words in commands_in(text, "eagle3") if (found := problem(words))]
    assert not wrong


def test_the_readme_names_every_command():
    """``notebooks`` is for who changes a parameter model."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = {words[0] for words in commands_in(text, "eagle3")}
    assert named == set(COMMANDS) - {"notebooks"}


@each_page
def test_every_make_target_and_module_exists(page):
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {words[0] for words in commands_in(text, "make")} <= targets
    for module in re.findall(r"python -m (eagle3lib[\w.]*)", text):
        assert find_spec(module), module


@each_page
def test_every_link_and_file_is_there(page):
    text = page.read_text(encoding="utf-8")
    links = [page.parent / link for link in re.findall(r"\]\((?!http|#)([^)#]+)", text)]
    top = r"`((?:docs|eagle3lib|notebooks|params|requirements|tests)/[\w./-]+)`"
    for path in [*links, *(ROOT / name for name in re.findall(top, text))]:
        assert path.exists(), path


def test_the_profile_of_the_readme_validates(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.split("    # params/mine.yaml\n")[1].split("    eagle3 run mine")[0]
    profile = tmp_path / "mine.yaml"
    profile.write_text("\n".join(line[4:] for line in block.split("\n")))
    assert load_profile(str(profile))["04_train_drafter"].steps == 7


def test_a_command_in_a_block_is_marked_or_run():
    """Parsed alone are only those that readers see marked; nothing is of no kind."""
    commands = [command for page in PAGES for command in block_commands(page)]
    unknown = [c for c in commands if c.kind == "run" and c.words[0] != "eagle3"]
    assert not unknown, "mark them [GPU] or [long], or name the test that runs them"
    assert {"marked", "run", *ELSEWHERE.values()} == {c.kind for c in commands}
    assert MARKS.search((ROOT / "docs" / "index.md").read_text(encoding="utf-8")), "told to readers"


def test_the_tests_that_run_commands_are_there():
    for test in ELSEWHERE.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test


def test_the_index_leads_to_every_page():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert pages - {"index.md"} <= set(re.findall(r"\]\(([^)]+)\)", text))


@pytest.mark.parametrize("name", PAGES_WRITTEN)
def test_the_reference_is_what_the_code_says(name):
    written = (FOLDER / name).read_text(encoding="utf-8")
    assert written == PAGES_WRITTEN[name](), "run: make docs"


def test_the_catalogue_holds_every_cause_and_no_other():
    """Codes are the texts in lower case with dashes among the rules, and the bold cells of a page's
    tables."""
    rules = ROOT / "eagle3lib" / "diagnose"
    code = re.compile(r"[a-z]+(?:-[a-z]+)+")
    texts = {
        node.value
        for path in sorted(rules.glob("rules_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    told = {text for text in texts if code.fullmatch(text)} | {"accounting"}
    page = (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}
    assert listed - told == set(), "no rule names them"
    assert told - listed - OF_THE_DOCTOR == set(), "not in docs/diagnosis.md"
