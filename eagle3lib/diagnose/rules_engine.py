"""Question 2: does the engine do what the drafter would? Named by the variant that it equals."""

from __future__ import annotations

from eagle3lib.diagnose.cause import Cause, Row, Series, bars, rows_of
from eagle3lib.diagnose.evidence import Evidence
from eagle3lib.diagnose.outcomes import Outcome, explained_up_to, is_explained
from eagle3lib.diagnose.served import Setting, drafts_of, rounds_equal

MANY_ROUNDS = 100
# Share of rounds that must be equal: all in float32 (878 of 878 with vLLM in one run); in bfloat16
# near-ties of the drafter's logits are decided by the order of sums.
AGREE = {"float32": 1.0, "bfloat16": 0.93}
_FEW = 3  # rounds that differ below which a named fault is a suspicion: one may be a tie
# Rounds that differ within bfloat16's room from which a fault that explains them is no chance: a
# tie tips either way, and the fault would have to tip each the engine's way, and no other.
_NO_TIES = 8
_WHERE = "06_benchmark_serving"
_EXPERIMENTS = (
    "prefix cache off; eager mode; tensor parallel 1; float32; a reference drafter; another engine"
)
REMEDY = {
    "engine-layer-ids": "write the ids where this engine looks, in its own numbering "
    "(vLLM: top level, before-layer; SGLang: eagle_config, output)",
    "engine-position": "the engine's draft positions are wrong: report it with this table",
    "engine-state-shift": "the engine pairs states and tokens wrongly: report it with this table",
    "engine-token-shift": "the engine feeds the token before: report it with this table",
    "engine-zero-states": "the engine hands over no states: check its auxiliary-state option",
    "engine-prefix-cache": "serve with the prefix cache off, and report it",
    "engine-map-ignored": "export d2t and t2d within the weights",
    "engine-map-misread": "this engine takes d2t for absolute ids: convert it for this engine",
    "engine-embeddings": "export the embeddings, or let the engine share the target's",
    "engine-rope": "write rope_theta and rope_parameters both into config.json",
    "engine-recurrent-norm": "norm_output is read otherwise: set it where the engine looks",
    "engine-residual": "norm_before_residual is read otherwise: set it, or train without it",
    "engine-norm-skipped": "the engine passes a norm by: name it in config.json, or train without",
    "engine-quantised": "set the drafter's own quantisation to none when the server is started",
    "engine-tensor-parallel": "serve with tensor parallel 1 for the drafter, and report it",
}

# vLLM 0.32 on a CPU spreads the temperature over the drafts by a kernel that writes none of it.
_SAMPLER = (
    "serve the same prompts at temperature 0: if drafts are accepted there, it is the engine's "
    "sampler, not the drafter (vLLM on a CPU, issue 55005: docs/serving.md)"
)


def agrees(e: Evidence) -> bool | None:
    """Whether the engine's record is the simulator's; None where there is nothing to compare."""
    if not e.engine_table or not e.engine_table[0].rounds:
        return None
    return e.engine_table[0].equal_share >= AGREE.get(e.material.dtype, AGREE["float32"])


def engine(e: Evidence) -> list[Cause]:
    agreed = agrees(e)
    nothing = _nothing(e)
    if agreed is None or nothing:
        return nothing
    plain = e.engine_table[0]
    variants = sorted(e.engine_table[1:], key=lambda o: -o.rounds_equal)
    missed, explained = plain.rounds - plain.rounds_equal, is_explained(e.engine_table)
    if agreed:
        return [_named(e, plain, variants)] if explained and missed >= _NO_TIES else []
    if drift := _drift(e, plain):
        return [drift]
    if explained:
        return [_named(e, plain, variants)]
    drafts = explained_up_to(e.engine_table, _NO_TIES)
    return [_named_up_to(e, plain, variants, drafts) if drafts else _unnamed(e, plain, variants[0])]


def _lengths(e: Evidence) -> tuple[float, float]:
    served = [n for a in e.answered for n in a.accepted or []]
    return 1 + sum(served) / max(len(served), 1), e.engine_table[0].acceptance_length or 1.0


def _named(e: Evidence, plain: Outcome, variants: list[Outcome]) -> Cause:
    """The variants come best first."""
    served, simulated = _lengths(e)
    best = variants[0]
    alike = [o for o in variants[1:] if o.rounds_equal == best.rounds_equal]
    labels = " or ".join(o.label for o in (best, *alike))
    few = plain.rounds - plain.rounds_equal < _FEW or bool(agrees(e))
    return Cause(
        best.cause, "warning" if few else "error",
        f"the engine serves the drafter with a fault: {labels}",
        f"{best.rounds_equal} of {best.rounds} rounds are those of \"{labels}\", "
        f"{plain.rounds_equal} those of the drafter as exported; {served:.2f} served, "
        f"{simulated:.2f} simulated",
        "; ".join(dict.fromkeys(REMEDY[o.cause] for o in (best, *alike))), _WHERE, question=2,
        proof="suspected" if few else "shown",
        cost=abs(simulated - served),
        experiment="the simulator with this very fault gives the engine's record, round by round",
        rows=_parted(e), series=_shares(e.engine_table),
        command="eagle3 run PROFILE 06 07",
        alike=tuple(dict.fromkeys(o.cause for o in alike if o.cause != best.cause)),
    )  # fmt: skip


def _named_up_to(e: Evidence, plain: Outcome, variants: list[Outcome], drafts: int) -> Cause:
    """A fault whose first ``drafts`` drafts of a round are a variant's, and whose later ones are
    no variant's: a late position that the cache slots follow, or two faults at once."""
    served, simulated = _lengths(e)

    def equal(o: Outcome) -> int:
        return o.up_to[drafts - 1][0] if len(o.up_to) >= drafts else 0

    most, (theirs, rounds) = max(map(equal, variants)), plain.up_to[drafts - 1]
    alike = [o for o in variants if equal(o) == most]
    labels = " or ".join(o.label for o in alike)
    codes = list(dict.fromkeys(o.cause for o in alike))
    return Cause(
        codes[0], "error",
        f"the engine serves the drafter with a fault: {labels}, and more after draft {drafts}",
        f"by the first {drafts} drafts {most} of {rounds} rounds are those of \"{labels}\", "
        f"{theirs} those of the drafter as exported; by all of them no known fault fits; "
        f"{served:.2f} served, {simulated:.2f} simulated",
        "; ".join(REMEDY[code] for code in codes), _WHERE, question=2, proof="measured",
        cost=abs(simulated - served),
        experiment=f"the simulator with this fault gives the engine's first {drafts} drafts; "
        f"serve the same prompts with K = {drafts}, then with K = {drafts + 1}",
        command="eagle3 run PROFILE 06 07", alike=tuple(codes[1:]),
        rows=_parted(e), series=_shares(e.engine_table),
    )  # fmt: skip


def _unnamed(e: Evidence, plain: Outcome, best: Outcome) -> Cause:
    served, simulated = _lengths(e)
    return Cause(
        "engine-disagrees", "error",
        f"the engine's rounds are not the drafter's: {served:.2f} served, {simulated:.2f} "
        "simulated",
        f"{plain.rounds_equal} of {plain.rounds} rounds equal; the nearest known fault is "
        f"\"{best.label}\" with {best.rounds_equal}",
        f"change one thing at a time and serve the same prompts again: {_EXPERIMENTS}",
        _WHERE, question=2, proof="suspected", cost=abs(simulated - served),
        experiment=f"to be done: {_EXPERIMENTS}", command="eagle3 run PROFILE 06 07",
        rows=_parted(e), series=_shares(e.engine_table),
    )  # fmt: skip


def _nothing(e: Evidence) -> list[Cause]:
    """Exactly 1.00 over many rounds: wiring, whatever the training. A record of zeros can't tell
    which of the faults that leave nothing it is, so the finding names them all."""
    record = [n for a in e.answered for n in a.accepted or []]
    if any(record) or len(record) < MANY_ROUNDS:
        return []
    alike = [o for o in e.engine_table[1:] if o.rounds and o.rounds_equal == o.rounds]
    return [nothing_accepted(e, len(record), alike)]


def nothing_accepted(e: Evidence, rounds: int, alike: list[Outcome]) -> Cause:
    """``alike``: the variants that would leave nothing as well."""
    plain = e.engine_table[0] if e.engine_table else None
    simulated = (plain.acceptance_length if plain else None) or 1.0
    could, heat = simulated > 1.02, e.material.benchmark.get("temperature", 0.0)
    alike = alike if could else []
    # Only where it sampled: greedily no sampler takes part.
    sampler = [f'"the engine\'s sampler at temperature {heat:g}"'] if could and heat else []
    labels = ", ".join([*sampler, *(f'"{o.label}"' for o in alike)])
    causes = tuple(dict.fromkeys(o.cause for o in alike))
    remedies = [_SAMPLER] * len(sampler) + [REMEDY[code] for code in causes]
    return Cause(
        "nothing-accepted", "error",
        f"not one draft was accepted in {rounds} rounds"
        + (f", as with {labels}, or with drafts that are never verified" if labels else ""),
        "a drafter that always says the commonest token is accepted now and then; the "
        f"simulator reaches {simulated:.2f}"
        + (f"; of the known faults of engines these alone leave nothing: {labels}"
           if labels else ""),
        "this is wiring, not training: "
        + ("; ".join(remedies) or "vocabulary map, embeddings, layer ids, shapes")
        + f"; look whether drafts are verified at all; {_EXPERIMENTS}",
        _WHERE, question=2, proof="shown" if could else "measured", cost=simulated - 1.0,
        experiment="the record of every round beside the simulator's, and beside every known "
        "fault's", command="eagle3 run PROFILE 06 07",
        alike=(("sampling-accepts-nothing",) if sampler else ()) + causes,
        series=bars("Acceptance length", "tokens a round", {"served": 1.0, "simulated": simulated}),
    )  # fmt: skip


def _drift(e: Evidence, plain: Outcome) -> Cause | None:
    """Right for the first requests, wrong for the later ones: something fills up or is reused."""
    pairs = [pair for _, pair in _by_answer(e)]
    half = max(1, len(pairs) // 2)
    early, late = _share(pairs[:half]), _share(pairs[half:])
    if len(pairs) < 6 or early < 0.97 or late > 0.9:
        return None
    served, simulated = _lengths(e)
    return Cause(
        "engine-drift", "error",
        "the engine is right for the first requests and wrong for the later ones",
        f"rounds equal to the simulator's: {early:.0%} in the first {half} requests, {late:.0%} in "
        "the others",
        "something is filled or reused too early: serve with the prefix cache off, and watch a "
        "fixed prompt over time",
        _WHERE, question=2, proof="shown", cost=abs(simulated - served),
        experiment="rounds equal to the simulator's, in the order of the requests",
        rows=_parted(e), series=Series(
            "Rounds equal to the simulator's, in the order of the requests", "share",
            tuple(str(i) for i in range(1, len(pairs) + 1)),
            tuple(a / n if n else 1.0 for a, n in pairs), line=True,
        ),
        command="eagle3 run PROFILE 06 07",
    )  # fmt: skip


def _by_answer(e: Evidence) -> list[tuple[str, tuple[int, int]]]:
    """(prompt, (rounds equal to the simulator's, rounds)) in the order of the requests."""
    assert e.material.drafter is not None and e.material.steps
    base = Setting(e.material.drafter, e.material.drafter.config.slots, e.material.steps)
    drafts = drafts_of(base, e.answered)
    told = [(d, a) for d, a in zip(drafts, e.answered, strict=True) if a.accepted]
    return [(a.id, rounds_equal(d, a)) for d, a in told]


def _parted(e: Evidence) -> tuple[Row, ...]:
    """The answers with most rounds that are not the simulator's."""
    if e.material.drafter is None:
        return ()
    parted = sorted(_by_answer(e), key=lambda line: line[1][0] - line[1][1])
    return rows_of(
        "prompt",
        (
            (name, f"{n - a} of {n} rounds are not the simulator's")
            for name, (a, n) in parted
            if a < n
        ),
    )


def _shares(table: list[Outcome], most: int = 6) -> Series | None:
    """The drafter as exported and the variants nearest to the engine's record."""
    best = sorted(table[1:], key=lambda o: -o.rounds_equal)[: most - 1]
    return bars(
        "Rounds that equal the engine's record", "share",
        {o.label: o.equal_share for o in (table[0], *best)},
    )  # fmt: skip


def _share(pairs: list[tuple[int, int]]) -> float:
    return sum(a for a, _ in pairs) / max(sum(n for _, n in pairs), 1)
