"""``eagle3 diagnose``: the causes of low acceptance of a run, or of anybody's drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_jsonl, write_json
from eagle3lib.target.smollm2 import NAME

if TYPE_CHECKING:
    from eagle3lib.diagnose.cause import Cause
    from eagle3lib.diagnose.evidence import Evidence
    from eagle3lib.measure.arms import RequestRow


def diagnose(
    run: Annotated[str, typer.Argument(help="a run; left out with --drafter")] = "",
    target: Annotated[str, typer.Option(help="built-in name, folder or Hub id")] = NAME,
    drafter: Annotated[Path | None, typer.Option(help="folder of a drafter from elsewhere")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL: messages to ask --server, or rows of ids with their rounds"),
    ] = None,
    server: Annotated[str, typer.Option(help="address of a server with this drafter")] = "",
    steps: Annotated[int, typer.Option(help="K, drafted tokens a round")] = 3,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32, as served")] = "bfloat16",
    max_tokens: Annotated[int, typer.Option(help="longest answer asked for")] = 96,
    out: Annotated[Path | None, typer.Option(help="write findings.json here")] = None,
) -> None:
    """Name the causes of low acceptance: of RUN, or of --drafter on --target with --prompts.

    Examples: eagle3 diagnose demo; eagle3 diagnose --target T --drafter D --prompts p.jsonl
    --server http://localhost:8000
    """
    from eagle3lib.diagnose.causes import causes_of
    from eagle3lib.diagnose.evidence import collect
    from eagle3lib.diagnose.material import foreign_material, read_material
    from eagle3lib.lab.run import run_folder
    from eagle3lib.target.folder import open_target

    if drafter is not None:
        rows = _asked(prompts, server, max_tokens)
        material = foreign_material(open_target(target), drafter, rows, steps, dtype)
    else:
        folder = run_folder(run) if run else Path()
        if not run or not (folder / "manifest.json").exists():
            raise UserError(
                f"there is no run {run!r}", where=folder,
                next="eagle3 diagnose RUN, or with --target, --drafter and --prompts",
            )  # fmt: skip
        bound = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["target"]
        material = read_material(folder, open_target(bound["name"]))
    evidence = collect(material)
    causes = causes_of(evidence)
    print(causes_text(causes))
    if out:
        write_json(out, _content(evidence, causes))


def _asked(prompts: Path | None, server: str, max_tokens: int) -> list[RequestRow]:
    """Requests of a JSONL: asked of a server now, or answered before (rows of ``requests.jsonl``).

    Raises ``UserError`` for rows that hold neither messages nor ids.
    """
    from eagle3lib.engine.client import Client
    from eagle3lib.measure.arms import OWN, RequestRow

    if prompts is None:
        raise UserError("no prompts", expected="--prompts FILE", next="eagle3 diagnose --help")
    if not prompts.exists():
        raise UserError("the file of prompts is not there", where=prompts)
    rows, out = read_jsonl(prompts), []
    client = Client(server.rstrip("/")) if server else None
    for number, row in enumerate(rows, start=1):
        name = str(row.get("prompt") or row.get("id") or f"row-{number}")
        if client is None and "answer_token_ids" in row:
            out.append(
                RequestRow(OWN, "workload", name, 0, row["prompt_token_ids"],
                           row["answer_token_ids"], row.get("finish_reason", ""),
                           float(row.get("duration_s", 0.0)), row.get("accepted"),
                           row.get("drafted"))
            )  # fmt: skip
        elif client is not None and "messages" in row:
            a = client.chat(row["messages"], max_tokens=max_tokens, temperature=0.0)
            out.append(
                RequestRow(OWN, "workload", name, 0, a.prompt_token_ids, a.answer_token_ids,
                           a.finish_reason, a.duration_s, a.rounds.accepted if a.rounds else None,
                           a.rounds.drafted if a.rounds else None)
            )  # fmt: skip
        else:
            raise UserError(
                f"row {number} can't be used: it has {', '.join(sorted(row)) or 'nothing'}",
                expected="messages with --server, or prompt_token_ids and answer_token_ids without",
                where=prompts,
            )
    if not any(r.accepted is not None for r in out):
        raise UserError(
            "no row has the engine's record of rounds",
            expected="accepted and drafted, lists of numbers a round",
            where=prompts,
            next="vLLM: serve with --per-request-spec-decode-metrics detailed",
        )
    return out


def causes_text(causes: list[Cause]) -> str:
    """Every cause in a few lines, for a terminal."""
    from eagle3lib.diagnose.phase import verdict_line

    lines = [verdict_line(causes), ""]
    for c in causes:
        cost = "" if c.cost is None else f", costs {c.cost:.2f} tokens a round"
        lines += [f"{c.severity}: {c.title}  [{c.code}; {c.proof}{cost}]", f"  {c.evidence}"]
        lines += [f"  proof:  {c.experiment}"] if c.experiment else []
        lines += [f"  remedy: {c.remedy}"]
        lines += [f"  run:    {c.command}"] if c.command else []
    return "\n".join(lines)


def _content(e: Evidence, causes: list[Cause]) -> dict[str, Any]:
    from eagle3lib.diagnose.evidence import facts
    from eagle3lib.diagnose.phase import report_of, verdict_line
    from eagle3lib.diagnose.waterfall import acceptance_waterfall

    return report_of(
        {
            "verdicts": {"cause": verdict_line(causes)},
            "findings": [c.as_dict() for c in causes],
            "waterfall": acceptance_waterfall(e),
            **facts(e),
        }
    )
