"""``eagle3 watch`` and ``eagle3 gate``: a drafter in service, and the next one's way there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3lib.lab.errors import UserError
from eagle3lib.target.smollm2 import NAME

if TYPE_CHECKING:
    from rich.table import Table

    from eagle3lib.measure.live import DriftAlarm, Look
    from eagle3lib.measure.replace import Replacement

_SHOWN_LOOKS = 12


def watch(
    address: Annotated[str, typer.Argument(help="of a running server, http://HOST:PORT")],
    reference: Annotated[
        Path | None,
        typer.Option(help="metrics.json of a benchmark, or a file of --save: what is normal"),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="seconds between looks")] = 10.0,
    looks: Annotated[int, typer.Option(min=0, help="stop after so many, 0 goes on")] = 0,
    false_alarm_every: Annotated[
        float, typer.Option(min=10, help="looks between false alarms, on average")
    ] = 1000.0,
    min_rounds: Annotated[int, typer.Option(min=1, help="rounds before a look counts")] = 200,
    save: Annotated[
        Path | None, typer.Option(help="write the counts here at the end, a reference for later")
    ] = None,
) -> None:
    """Follow acceptance, speed and latency of a live server; exits with 1 when acceptance drifts.

    Example: eagle3 watch http://127.0.0.1:8000 --reference
    outputs/demo/06_benchmark_serving/metrics.json
    """
    from rich.live import Live

    from eagle3lib.measure.live import DriftAlarm, look_between, read_metrics, read_reference

    alarm = None
    if reference is not None:
        alarm = DriftAlarm(read_reference(reference), false_alarm_every, min_rounds)
    seen: list[Look] = []
    before, at_s, drifted = read_metrics(address), time.monotonic(), False
    try:
        with Live(_table(seen, alarm), auto_refresh=False) as live:
            while not drifted and (not looks or len(seen) < looks):
                time.sleep(interval)
                after, now_s = read_metrics(address), time.monotonic()
                seen.append(look_between(before, after, now_s - at_s))
                before, at_s = after, now_s
                drifted = alarm is not None and alarm.add(seen[-1])
                live.update(_table(seen, alarm), refresh=True)
    except KeyboardInterrupt:
        print("stopped")
    if save is not None:
        _save(seen, save)
    if drifted and alarm is not None:
        _tell_drift(alarm)
        raise typer.Exit(1)


def _table(seen: list[Look], alarm: DriftAlarm | None) -> Table:
    from rich.table import Table

    steps = max((len(look.accepted_at) for look in seen), default=0)
    title = "acceptance (with the target's own token), speed and latency"
    table = Table(title=title, caption=_caption(seen, alarm))
    names = ["tok/s", "running", "requests", "rounds", "length"]
    names += [f"step {k + 1}" for k in range(steps)] + ["first token, ms", "between tokens, ms"]
    for name in names:
        table.add_column(name, justify="right")
    for look in seen[-_SHOWN_LOOKS:]:
        length, per_step = look.acceptance_length, look.per_step or [None] * steps
        table.add_row(
            f"{look.tokens_per_s:.1f}",
            str(look.running),
            str(look.requests),
            ("~" if look.rough else "") + f"{look.rounds}" + (" anew" if look.restarted else ""),
            "" if length is None else f"{length:.3f}",
            *["" if share is None else f"{share:.1%}" for share in per_step],
            _ms(look.first_token_s),
            _ms(look.inter_token_s),
        )
    return table


def _caption(seen: list[Look], alarm: DriftAlarm | None) -> str:
    rough = "; rounds follow from a gauge, roughly" if seen and seen[-1].rough else ""
    if alarm is None:
        return f"no reference, no alarm{rough}"
    measured = "measured" if alarm.reference.spread_measured else "assumed"
    return (
        f"drift {alarm.sum:.1f} of {alarm.limit:.1f}, reference length "
        f"{1 + alarm.reference.mean:.3f}, a false alarm every "
        f"{alarm.looks_between_false_alarms:.0f} looks "
        f"(spread of texts {alarm.reference.spread:.1f}, {measured}){rough}"
    )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.1f}"


def _tell_drift(alarm: DriftAlarm) -> None:
    print(
        f"drift: the acceptance length fell below the reference's {1 + alarm.reference.mean:.3f} "
        f"(CUSUM {alarm.sum:.1f}, limit {alarm.limit:.1f}, a false alarm every "
        f"{alarm.looks_between_false_alarms:.0f} looks)\n"
        "  next: other prompts than the drafter knows, or another target, template or sampling; "
        "train on what is asked now, then eagle3 gate OLD NEW"
    )


def _save(seen: list[Look], path: Path) -> None:
    """Counts of all looks, a reference for later."""
    from eagle3lib.lab.files import write_json

    width = max((len(look.accepted_at) for look in seen), default=0)
    padded = [[*look.accepted_at, *[0] * (width - len(look.accepted_at))] for look in seen]
    told = {
        "rounds": sum(look.rounds for look in seen),
        "accepted": sum(look.accepted for look in seen),
        "accepted_at": [sum(column) for column in zip(*padded, strict=True)],
    }
    write_json(path, told)


def gate(
    old: Annotated[Path, typer.Argument(help="folder of the deployed drafter")],
    new: Annotated[Path, typer.Argument(help="folder of the one that is to replace it")],
    target: Annotated[str, typer.Option(help="built-in name, folder or Hub id")] = NAME,
    run: Annotated[str, typer.Option(help="a run of this target with held-out answers")] = "demo",
    served: Annotated[
        bool,
        typer.Option(help="compare what the run's benchmark served: reference OLD, own NEW"),
    ] = False,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=1, max=16, help="K; served: the run's")
    ] = 3,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32; served: the run's")] = "bfloat16",
    allowed_loss: Annotated[
        float, typer.Option(min=0, help="tokens a round that the new one may be worse by")
    ] = 0.0,
    prompts: Annotated[int, typer.Option(min=5, help="held-out answers at most")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="print the numbers as JSON")] = False,
) -> None:
    """May NEW replace OLD? Both on the same held-out prompts, with a 95 % interval.

    Exits with 0 to replace, 1 to keep the old one or when the two can't be told apart.
    """
    from eagle3lib.measure.replace import REPLACE, decide

    if served:
        pairs = _served_pairs(run, target, old, new)
    else:
        pairs = _offline_pairs(run, target, old, new, num_speculative_tokens, dtype, prompts)
    result = decide(pairs, allowed_loss=allowed_loss)
    print(json.dumps(result.as_dict(), indent=2) if as_json else _told(result))
    if result.decision != REPLACE:
        raise typer.Exit(1)


def _offline_pairs(
    run: str, target: str, old: Path, new: Path, steps: int, dtype: str, most: int
) -> list[Any]:
    from eagle3lib.data.rows import read_answers
    from eagle3lib.lab.run import check_run_target, existing_run
    from eagle3lib.measure.replace_offline import offline_pairs
    from eagle3lib.target.folder import open_target
    from eagle3lib.target.images import shows_images

    folder, opened = existing_run(run) / "01_generate_data", open_target(target)
    check_run_target(run, opened.name, opened.fingerprint)
    held = [
        row
        for row in read_answers(folder)
        if (row.set, row.split, row.repeat) == ("workload", "heldout", 0)
    ]
    rows = [row for row in held if not shows_images(opened, row.prompt_token_ids)]
    if len(rows) < len(held):
        seen = len(held) - len(rows)
        typer.echo(f"left out: {seen} of {len(held)} answers, whose prompts show images", err=True)
    rows = rows[:most]
    if not rows:
        raise UserError(
            f"run {run!r} has no held-out answers{' to text alone' if held else ''}",
            where=folder,
            next="--run NAME of a run that has some (eagle3 run PROFILE 01)",
        )
    return offline_pairs(rows, opened, old, new, dtype=dtype, steps=steps)


def _served_pairs(run: str, target: str, old: Path, new: Path) -> list[Any]:
    from eagle3lib.lab.files import read_json
    from eagle3lib.lab.phase_params import resolve
    from eagle3lib.lab.run import check_run_target, existing_run, outdated_by, run_folder
    from eagle3lib.measure.arms import OWN, REFERENCE, drafter_folder, read_requests
    from eagle3lib.measure.replace import served_pairs
    from eagle3lib.target.folder import open_target

    phase, opened = existing_run(run) / "06_benchmark_serving", open_target(target)
    check_run_target(run, opened.name, opened.fingerprint)
    if not (phase / "metrics.json").exists():
        raise UserError(f"run {run!r} has no benchmark", where=phase, next=f"eagle3 run {run} 06")
    inputs = read_json(phase / "inputs.json")
    reference = inputs["params"].get("reference_drafter")
    if not reference:
        raise UserError(
            "the run's benchmark had no reference drafter, so nothing to compare NEW with",
            expected=f"OLD {old} as its reference",
            where=phase,
            next=f"eagle3 run {run} 06 reference_drafter={old}",
        )
    asked = resolve(reference)
    own = drafter_folder(run_folder(run), OWN)
    if asked.resolve() != old.resolve() or own.resolve() != new.resolve():
        raise UserError(
            "the benchmark did not serve these two drafters",
            expected=f"OLD {asked} (reference_drafter) and NEW {own}",
            where=phase,
            next=f"eagle3 run {run} 06 reference_drafter={old}",
        )
    if again := outdated_by(phase.parent, phase.name):
        raise UserError(
            f"made again since the benchmark served it: {', '.join(again)}",
            where=phase,
            next=f"eagle3 run {run} 06",
        )
    steps = read_json(phase / "metrics.json")["num_speculative_tokens"]
    return served_pairs(read_requests(phase), REFERENCE, OWN, steps)


def _told(result: Replacement) -> str:
    return (
        f"{result.decision}: acceptance length {result.new_length:.3f} against "
        f"{result.old_length:.3f}, difference {result.difference:+.3f} "
        f"({result.low:+.3f} to {result.high:+.3f}, 95 % over {result.prompts} prompts, "
        f"{result.allowed_loss:g} allowed to lose)\n"
        "this is acceptance; a drafter of another size or K also costs another round: phase 06"
    )
