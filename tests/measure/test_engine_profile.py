"""Profiles of two arms on stand-ins: counts of the engine's own record, the profiler's price."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler

import fake_engine
import pytest
from fake_engine import FakeEngine
from trace_shapes import cpu_events, write_trace

from eagle3lib import cli
from eagle3lib.engine import profiler
from eagle3lib.engine.client import Answer, BadReply
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.stream import Streamed
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.run import begin, run_folder
from eagle3lib.measure import profile
from eagle3lib.measure.arms import PLAIN
from eagle3lib.measure.profile import WITH_DRAFTER, Load, profile_arms, read_profile
from eagle3lib.measure.trace_kinds import DRAFTER
from eagle3lib.report.page import page_figures
from eagle3lib.report.profile_figures import facts, profile_bars, profile_rows, write_profile_page
from eagle3lib.target.smollm2 import NAME

ASKED = [{"role": "user", "content": "x"}]
ROUNDS = [2, 0, 3]  # 1 + 3 + 1 + 4 tokens


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """Servers in place of ``EngineServer``: with a drafter each answer has three rounds. Stopping
    its profiler writes the trace that ``engines.events`` makes; None: it has no profiler."""
    monkeypatch.setattr(profiler, "_POLL_S", 0.02)
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "outputs"))

    class Engines:
        events = staticmethod(cpu_events)
        configs = ()

    class Handler(fake_engine._Handler):
        def do_POST(self):
            if not self.path.endswith("_profile"):
                return super().do_POST()
            if self.path.startswith("/stop") and Engines.events:
                folder = Engines.configs[-1].trace_folder
                write_trace(folder / "rank0.1.pt.trace.json.gz", Engines.events())
            self.send_response(200 if Engines.events else 404)
            self.end_headers()

    assert issubclass(Handler, BaseHTTPRequestHandler)
    monkeypatch.setattr(fake_engine, "_Handler", Handler)

    class Server:
        version = "9.9"

        def __init__(self, config, log, say=print, **options):
            self.config, self.say = config, say
            Engines.configs += (config,)

        def __enter__(self):
            self.fake = FakeEngine(ROUNDS if self.config.drafter else ())
            self.url = self.fake.url
            return self

        def __exit__(self, *_):
            self.fake.close()

    monkeypatch.setattr(profile, "EngineServer", Server)
    return Engines


@pytest.fixture
def made(engines, tmp_path):
    """A profile of both arms, two answers a load."""
    config = EngineConfig(tmp_path / "target", threads=1)
    load = Load([ASKED, ASKED], tokens=9)
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text("{}")
    return profile_arms(config, tmp_path / "drafter", load, tmp_path / "out", say=lambda text: None)


def test_both_arms_in_order_counted_by_the_engines_own_record(made, engines, tmp_path):
    plain, drafted = made["arms"]
    assert [plain["arm"], drafted["arm"]] == [PLAIN, WITH_DRAFTER]
    assert [c.drafter for c in engines.configs] == [None, tmp_path / "drafter"]
    assert all(c.trace_folder for c in engines.configs)
    # Two answers of nine tokens: eight steps each, or three rounds each of five accepted drafts.
    assert plain["counted_steps"] == 16 and drafted["counted_steps"] == 6
    assert drafted["marked_steps"] == 6 and drafted["notes"] == []
    assert plain["notes"] == ["the trace marks 6 steps, the engine counted 16"]
    assert drafted["acceptance_length"] == pytest.approx(1 + 10 / 6)
    assert plain["acceptance_length"] is None
    # Without the profiler it is asked before and after.
    assert (drafted["profiled"]["steps"], drafted["unprofiled"]["steps"]) == (6, 12)
    times = [drafted[k]["decode_s"] / drafted[k]["steps"] for k in ("profiled", "unprofiled")]
    assert drafted["slowdown"] == pytest.approx(times[0] / times[1])
    cost = drafted["unprofiled"]["step_s"] / plain["unprofiled"]["step_s"]
    assert made["round_cost"] == pytest.approx(cost)
    assert read_profile(tmp_path / "out") == json.loads(json.dumps(made))


def test_the_kinds_of_the_file_sum_to_the_step(made):
    for arm in made["arms"]:
        assert sum(arm["kinds"].values()) == pytest.approx(arm["step_s"], rel=1e-9)


def test_one_arm_without_a_drafter(engines, tmp_path):
    config, load = EngineConfig(tmp_path, threads=1), Load([ASKED], tokens=9)
    found = profile_arms(config, None, load, tmp_path, say=lambda text: None)
    assert [arm["arm"] for arm in found["arms"]] == [PLAIN] and found["round_cost"] is None
    assert [row["added_s"] for row in profile_rows(found)] == [None] * len(profile_rows(found))


def test_a_drafter_that_no_scope_tells_is_noted(engines, tmp_path):
    engines.events = lambda: [e for e in cpu_events() if "draft" not in e["name"]]
    config = EngineConfig(tmp_path, threads=1)
    found = profile_arms(config, tmp_path, Load([ASKED]), tmp_path / "o", say=lambda text: None)
    assert any("--stacks" in note for note in found["arms"][1]["notes"])


def test_an_engine_without_a_profiler_or_answers_of_one_token_end_clearly(engines, tmp_path):
    config, load = EngineConfig(tmp_path, threads=1), Load([ASKED], tokens=9)
    with pytest.raises(UserError, match="no step to profile"):
        profile_arms(config, None, replace(load, tokens=1), tmp_path, say=lambda text: None)
    engines.events = None
    with pytest.raises(UserError, match="no profiler"):
        profile_arms(config, None, load, tmp_path, say=lambda text: None)
    assert not (tmp_path / "profile.json").exists()


def test_the_figure_has_both_bars_whole_and_the_page_its_numbers(made, tmp_path):
    figure = profile_bars(made)
    for panel, whole in (("", [1000 * a["step_s"] for a in made["arms"]]), ("2", [1.0, 1.0])):
        bars = [t for t in figure.data if (t.xaxis or "x") == f"x{panel}"]
        heights = [sum(t.y[i] for t in bars) for i in range(2)]
        assert heights == pytest.approx(whole)
        assert {"idle", "drafter", "other operators"} <= {t.name for t in bars}
    rows = {row["kind"]: row for row in profile_rows(made)}
    assert sum(r["shares"][1] for r in profile_rows(made)[:-1]) == pytest.approx(1.0)
    assert rows[DRAFTER]["seconds"][1] == pytest.approx(300e-6)
    page = write_profile_page(made, tmp_path / "out").read_text(encoding="utf-8")
    assert "added by the round" in page and "mystery::thing" in page and "0.300" in page
    assert "plain steps" in page and all(fact in page for fact in facts(made)[-1:])


def test_a_runs_page_shows_the_profile_of_the_drafter_that_it_has_now(made, engines, tmp_path):
    phase = begin(PHASES["00_plan"](run="r"), "0123456789abcdef")
    phase.finish({})
    folder = run_folder("r")
    (tmp_path / "out").rename(folder / "profile")
    assert "profile" not in page_figures("r")  # the run has no drafter
    own = folder / "05_export_drafter" / "drafter"
    shutil.copytree(tmp_path / "drafter", own)
    assert "profile" in page_figures("r")
    (own / "README.md").write_text("its card, written again")
    assert "profile" in page_figures("r")
    (own / "config.json").write_text('{"another": 1}')
    assert "profile" not in page_figures("r")


@pytest.fixture
def eagle3(engines, monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["eagle3", "profile", *words])
        try:
            cli.main()
            code = 0
        except SystemExit as stopped:
            code = stopped.code or 0
        told = capsys.readouterr()
        return code, told.out + told.err

    return run


def test_the_command_prints_the_table_and_writes_the_folder(
    eagle3, engines, tiny_target, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "drafter").mkdir()
    words = (str(tiny_target.folder), "dtype=float32", "num_speculative_tokens=3")
    words += ("--drafter", str(tmp_path / "drafter"), "--tokens", "9", "--requests", "2")
    code, shown = eagle3(*words, "--no-preflight", "--no-stacks", "--", "--any-flag=1")
    assert code == 0, shown
    assert "decode step, ms" in shown and "round, ms" in shown and "drafter" in shown
    assert "a round costs" in shown
    (page,) = (tmp_path / "outputs" / "profiles").glob("*/index.html")
    assert str(page) in shown.replace("\n", "") and (page.parent / "profile.json").exists()
    assert all(c.dtype == "float32" for c in engines.configs)
    assert all("--any-flag=1" in c.extra_flags for c in engines.configs)


def test_a_run_is_profiled_with_its_own_target_and_drafter(eagle3, engines, tiny_target):
    """Left out, TARGET is the built-in one, whatever the run's is."""
    begin(PHASES["00_plan"](run="r"), tiny_target.fingerprint).finish({})
    begin(PHASES["00_plan"](run="other"), "0123456789abcdef").finish({})
    words = (str(tiny_target.folder), "--no-preflight", "--tokens", "9")
    code, shown = eagle3(*words, "--run", "other")
    assert code == 2 and "run 'other' belongs to target" in shown and not engines.configs
    own = run_folder("r") / "05_export_drafter" / "drafter"
    own.mkdir(parents=True)
    code, shown = eagle3(*words, "--run", "r")
    assert code == 0, shown
    assert [c.drafter for c in engines.configs] == [None, own]
    assert "profile" in page_figures("r") and (run_folder("r") / "index.html").exists()


MISTAKES = [
    (["--drafter", "/no/drafter"], "the drafter is not there"),
    (["--run", "never-run"], "no run 'never-run'"),
    (["drafter=/a", "--drafter", "/b"], "two drafters"),
    (["topkk=3"], "topkk"),
    (["host=0.0.0.0"], "host is not for a profile"),
    (["log=/tmp/x.log"], "log is not for a profile"),
    (["--prompts", "/no/prompts.jsonl"], "/no/prompts.jsonl"),
    (["--run", "x", "--out", "y"], "both --out and --run"),
]


@pytest.mark.parametrize(("words", "told"), MISTAKES, ids=lambda v: " ".join(v)[:40])
def test_a_mistake_is_one_message_and_starts_nothing(eagle3, engines, tiny_target, words, told):
    code, shown = eagle3(str(tiny_target.folder), *words, "--no-preflight")
    assert code == 2 and told in shown and "Traceback" not in shown
    assert not engines.configs


@pytest.mark.engine
@pytest.mark.long
def test_vllm_on_the_cpu_is_profiled_alone_and_with_a_drafter(tmp_path, monkeypatch, capsys):
    """Its own trace, marks and scopes: each step counted, the drafter apart, little unknown."""
    from eagle3lib.lab.machine import ROOT

    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    monkeypatch.delenv("EAGLE3_VLLM_PYTHON", raising=False)
    drafter = ROOT / "outputs" / "reference" / "smollm2-135m-eagle3"
    words = ["profile", NAME, "compile=false", "max_model_len=512", "max_num_seqs=4"]
    words += ["--drafter", str(drafter), "--requests", "2", "--tokens", "24", "--no-preflight"]
    monkeypatch.setattr(sys, "argv", ["eagle3", *words, "--out", str(tmp_path / "out")])
    cli.main()
    found = read_profile(tmp_path / "out")
    for arm in found["arms"]:
        assert arm["device"] == "cpu" and arm["steps"] > 5
        assert sum(arm["kinds"].values()) == pytest.approx(arm["step_s"], rel=1e-6)
        assert abs(arm["marked_steps"] - arm["counted_steps"]) <= 2
        assert arm["kinds"]["matrix products"] > 0.05 * arm["step_s"]
        assert arm["kinds"]["attention"] > 0 and arm["kinds"]["sampling"] > 0
        assert arm["kinds"]["other operators"] < 0.1 * arm["step_s"]
        assert arm["step_s"] == pytest.approx(arm["profiled"]["step_s"], rel=0.25)
    plain, drafted = found["arms"]
    assert plain["kinds"][DRAFTER] == 0 < drafted["kinds"][DRAFTER] < drafted["step_s"]
    assert found["round_cost"] > 1 and drafted["acceptance_length"] > 1.2
    assert "decode step" in capsys.readouterr().out


def test_chunks_are_rounds_of_a_lone_request_alone(tmp_path):
    answer = Answer([1], list(range(7)), "", "length", 1.0, None)
    streamed = Streamed(answer, [0.1, 0.2, 0.3], [1, 4, 2])
    config = EngineConfig(tmp_path, drafter=tmp_path, num_speculative_tokens=3)
    assert profile._asking(streamed, config).steps == 2
    with pytest.raises(BadReply, match="concurrency 1"):
        profile._asking(streamed, config, concurrency=2)
