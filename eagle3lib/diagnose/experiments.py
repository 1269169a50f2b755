"""The experiment that proves a cause, as commands with this run's own names.

An experiment changes one thing and says what each outcome would mean. A run measures in its own
folder: what was there is set aside as ``PHASE.previous``, and the cause's own command brings the
run's parameters back. A drafter from elsewhere is served by ``eagle3 serve`` and asked again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from eagle3lib.diagnose.cause import Cause, Trial
from eagle3lib.diagnose.material import Material
from eagle3lib.lab.journal import run_words, shown_path
from eagle3lib.lab.run import outputs_root
from eagle3lib.target.smollm2 import NAME

_PORT = 8000
_SAME = "equal rounds now: that was the cause; still other rounds: it was not"
_SERVING = ("eager", "one_gpu", "prefix_cache", "float32", "reference", "other_engine", "overfit")
_OF_QUESTION = {
    1: ("again",), 2: _SERVING, 3: ("doctor", "export"), 4: ("states", "overfit"),
    5: ("tokens", "predictions"), 6: ("predictions",), 7: ("profile", "fewer_drafts"),
}  # fmt: skip
_OF_CODE = {
    "k-mistranslated": ("fewer_drafts",),
    "sampled-benchmark": ("greedy",),
    "sampling-accepts-nothing": ("greedy",),
    "nothing-accepted": ("greedy", "doctor", *_SERVING),
    "client-template": ("tokens",),
    "engine-prefix-cache": ("prefix_cache", "other_engine"),
    "engine-tensor-parallel": ("one_gpu", "other_engine"),
    "engine-layer-ids": ("doctor", "other_engine"),
    "engine-map-ignored": ("doctor", "other_engine"),
    "engine-map-misread": ("doctor", "other_engine"),
    "engine-embeddings": ("doctor", "other_engine"),
    "engine-rope": ("doctor", "other_engine"),
    "reference-sound": ("doctor", "overfit"),
    "weak-drafter": ("overfit", "predictions"),
    "never-learnt": ("overfit",),
    "no-better-than-counting": ("overfit",),
    "few-steps": ("more_steps",),
    "off-policy": ("tokens", "predictions"),
    "slower-elsewhere": ("profile",),
}


def with_trials(causes: list[Cause], m: Material) -> list[Cause]:
    """The causes with their experiments, and with this run's names in their commands. What can't
    be done here, or would change nothing, is left out."""
    return [replace(c, command=_named(c, m), trials=trials_of(c, m)) for c in causes]


def trials_of(cause: Cause, m: Material) -> tuple[Trial, ...]:
    names = _OF_CODE.get(cause.code, _OF_QUESTION[cause.question])
    made = (_TRIALS[name](m) for name in names)
    return tuple(trial for trial in made if trial is not None)


def _named(cause: Cause, m: Material) -> str:
    if m.folder is not None:
        answers = _path(m.folder / "01_generate_data" / "answers.jsonl")
        named = cause.command.replace("PROFILE", run_words(m.folder))
        return named.replace("answers.jsonl", f"{answers} --target {_target(m)}")
    # No phase can be run again here: ask again when it is mended.
    return _diagnose(m) if cause.command else ""


def _path(path: Path) -> str:
    return shlex.quote(shown_path(path))


def _target(m: Material) -> str:
    return shlex.quote(m.target.name)


def _run(m: Material, *words: str) -> tuple[str, ...]:
    """``words`` on top of the run's own parameters; () where there is no run."""
    if m.folder is None:
        return ()
    return (" ".join(["eagle3 run", run_words(m.folder), *(shlex.quote(w) for w in words)]),)


def _diagnose(m: Material, server: str = "", prompts: str = "") -> str:
    words = ["eagle3 diagnose", f"--target {_target(m)}"]
    words += [f"--drafter {_path(m.export)}"] if m.export else []
    words += [f"--prompts {shlex.quote(prompts or m.asked or 'prompts.jsonl')}"]
    words += [f"--server {shlex.quote(server or m.server)}"] if server or m.server else []
    return " ".join([*words, f"--steps {m.steps}"] if m.steps else words)


def _served(m: Material, *settings: str) -> tuple[str, ...]:
    """Serve a drafter from elsewhere with ``settings``, and ask it again; () for answers that were
    recorded before, or without a drafter."""
    if m.export is None or not m.server:
        return ()
    serve = ["eagle3 serve", _target(m), f"drafter={_path(m.export)}",
             f"num_speculative_tokens={m.steps}", *settings, f"port={_PORT}",
             "--detach"]  # fmt: skip
    return " ".join(serve), _diagnose(m, f"http://127.0.0.1:{_PORT}")


def _engine(m: Material) -> str:
    return "sglang" if "sglang" in str(m.served_params.get("engines", "vllm")) else "vllm"


def _settings(m: Material) -> str:
    return str(m.served_params.get(f"{_engine(m)}_settings") or "")


def _trial(what: str, commands: tuple[str, ...], tells: str) -> Trial | None:
    return Trial(what, commands, tells) if commands else None


def _again(m: Material) -> Trial | None:
    return _trial("measure once more, on a server that nobody else asks",
                  _run(m, "06", "07", "repeats=3") or (_diagnose(m),),
                  "it stays: the measurement is at fault; it goes: others asked too")  # fmt: skip


def _eager(m: Material) -> Trial | None:
    compiled = m.folder is None or bool(m.served_params.get("compile"))
    commands = _run(m, "06", "07", "compile=false") or _served(m, "compile=false")
    return _trial("no compiled graphs (eager)", commands if compiled else (), _SAME)


def _one_gpu(m: Material) -> Trial | None:
    """Only where several GPUs share each layer: alone, nothing would change."""
    words = _settings(m).split()
    wide = [i for i, word in enumerate(words) if word.startswith("tensor_parallel=")]
    if m.folder is None:
        commands = _served(m, "tensor_parallel=1")
    elif wide and words[wide[-1]] != "tensor_parallel=1":
        words[wide[-1]] = "tensor_parallel=1"
        commands = _run(m, "06", "07", f"{_engine(m)}_settings={' '.join(words)}")
    else:
        commands = ()
    return _trial("one GPU for each layer (tensor parallel 1)", commands, _SAME)


def _prefix_cache(m: Material) -> Trial | None:
    """A benchmark of this repository has it off already."""
    return _trial("the prefix cache off", _served(m, "prefix_cache=false"), _SAME)


def _float32(m: Material) -> Trial | None:
    other = m.dtype != "float32"
    commands = _run(m, "06", "07", "dtype=float32") or _served(m, "dtype=float32")
    return _trial("float32, where no tie can tip", commands if other else (), _SAME)


def _reference(m: Material) -> Trial | None:
    shipped = outputs_root() / "reference" / "smollm2-135m-eagle3"
    if m.target.name != NAME or not shipped.is_dir() or m.served_params.get("reference_drafter"):
        return None
    return _trial("a drafter that is known to be good, beside the own one",
                  _run(m, "06", "07", f"reference_drafter={shipped}"),
                  "it accepts as known: serving is sound, look at the own drafter; it does not "
                  "either: engine or settings")  # fmt: skip


def _other_engine(m: Material) -> Trial | None:
    other = "vllm" if _engine(m) == "sglang" else "sglang"
    return _trial(f"another engine ({other})",
                  _run(m, "06", "07", f"engines={other}") or _served(m, f"engine={other}"),
                  "right there: report it to the first one; wrong there: the export")  # fmt: skip


def _overfit(m: Material) -> Trial | None:
    """Trains on the few first answers until they are known by heart, then asks one of them."""
    row = next((r for r in m.answers if r.trained and r.messages and not r.turn), None)
    if m.folder is None or row is None:
        return None
    name = f"{m.folder.name}-overfit"
    drafter = _path(outputs_root() / name / "05_export_drafter" / "drafter")
    asked = json.dumps({"messages": row.messages}, ensure_ascii=False)
    server = f"http://127.0.0.1:{_PORT}"
    # The headline's K, and steps enough for it.
    run = _run(m, "01", "02", "03", "04", "05", f"run={name}", "answer_tokens=1000", "epochs=200",
               f"steps={max(m.steps or 3, 3)}")  # fmt: skip
    return Trial(
        "overfit a few training answers, and serve one of their prompts",
        (*run, f"printf '%s\\n' {shlex.quote(asked)} > one.jsonl",
         f"eagle3 serve {_target(m)} drafter={drafter} num_speculative_tokens={m.steps or 3} "
         f"port={_PORT} --detach",
         f"eagle3 diagnose --target {_target(m)} --drafter {drafter} --prompts one.jsonl "
         f"--server {server}"),
        f"near {(m.steps or 3) + 1} tokens a round served: training and serving are wired right, "
        "the drafter needs data; simulated but not served: the engine; neither: the training",
    )  # fmt: skip


def _doctor(m: Material) -> Trial | None:
    if m.export is None:
        return None
    command = f"eagle3 doctor {_path(m.export)} --target {_target(m)}"
    return Trial("what each engine will read in the export", (command,),
                 "every error is a fault of the files, whatever was trained")  # fmt: skip


def _export(m: Material) -> Trial | None:
    return _trial("export again, serve it, compare", _run(m, "05", "06", "07"),
                  "right now: the files had been changed after the export")  # fmt: skip


def _states(m: Material) -> Trial | None:
    if m.folder is None:
        return None
    return Trial("norms, outliers and likeness of the stored states by slot and layer",
                 (f"eagle3 explore hidden_states --run {m.folder.name}",),
                 "a slot unlike its layer's: states were stored wrongly")  # fmt: skip


def _tokens(m: Material) -> Trial | None:
    if m.folder is None:
        return None
    answers = _path(m.folder / "01_generate_data" / "answers.jsonl")
    return Trial("read a trained row, its trained tokens marked",
                 (f"eagle3 tokens {answers} --target {_target(m)}",),
                 "it must look as the server's own prompts and answers do")  # fmt: skip


def _predictions(m: Material) -> Trial | None:
    if m.folder is None:
        return None
    return Trial("which tokens are missed, and what the drafter said there",
                 (f"eagle3 explore drafter_predictions --run {m.folder.name}",),
                 "misses of one kind (names, code, another language) are missing data")  # fmt: skip


def _more_steps(m: Material) -> Trial | None:
    return _trial("train as many steps as are served",
                  _run(m, "04", "05", "06", "07", f"steps={m.steps}"),
                  "later steps accept more: that was the cause")  # fmt: skip


def _greedy(m: Material) -> Trial | None:
    """Only where the benchmark sampled: greedy rounds are asked for already."""
    commands = _run(m, "06", "07", "temperatures=0") if m.benchmark.get("temperature") else ()
    return _trial("the same prompts at temperature 0", commands,
                  "drafts are accepted there: it was the sampling, not the drafter")  # fmt: skip


def _fewer_drafts(m: Material) -> Trial | None:
    """Smaller K, each measured."""
    fewer = [str(k) for k in range(1, (m.steps or 1))]
    commands = _run(m, "06", "07", f"more_speculative_tokens={','.join(fewer)}") if fewer else ()
    if m.folder is None and m.steps:
        commands = _served(m)
    return _trial("fewer drafts a round", commands,
                  "the K with the most tokens a second is the one to serve")  # fmt: skip


def _profile(m: Material) -> Trial | None:
    if m.folder is None:
        return None
    return Trial("where a decode step and a round spend their time",
                 (f"eagle3 profile {_target(m)} --run {m.folder.name}",),
                 "what grows from a plain step to a round is what the drafter costs")  # fmt: skip


_TRIALS: dict[str, Callable[[Material], Trial | None]] = {
    "again": _again, "eager": _eager, "one_gpu": _one_gpu, "prefix_cache": _prefix_cache,
    "float32": _float32, "reference": _reference, "other_engine": _other_engine,
    "overfit": _overfit, "doctor": _doctor, "export": _export, "states": _states,
    "tokens": _tokens, "predictions": _predictions, "more_steps": _more_steps, "greedy": _greedy,
    "fewer_drafts": _fewer_drafts, "profile": _profile,
}  # fmt: skip
