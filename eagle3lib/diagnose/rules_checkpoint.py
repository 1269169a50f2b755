"""Question 3: is the checkpoint what was trained?

Two proofs: tensors and settings against those of the training, and what the drafter would reach
with one thing mended, along the very answers that were served.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3lib.diagnose.cause import Cause, as_cause, bars, rows_of
from eagle3lib.diagnose.evidence import Evidence
from eagle3lib.diagnose.material import Material
from eagle3lib.diagnose.outcomes import Outcome
from eagle3lib.drafter.config import OPTIONS
from eagle3lib.drafter.rope import rope_parameters
from eagle3lib.lab.errors import UserError

_WHERE = "05_export_drafter"
_AGAIN = "eagle3 run PROFILE 05"
_SURE = 4.0  # standard errors from which a gain is no chance (several variants are tried)
_LEAST_GAIN = 0.02  # accepted drafts a base position
# Rounding to bfloat16 moves a weight by at most 1/256 of itself; more is another tensor.
_ROUNDING = 1 / 128
# The laws of the map are told by their own rules where a training's map is at hand.
_OWN_CODES = ("tied-reduced-head", "layer-ids-conflict", "vocab-map", "other-target")


def checkpoint(e: Evidence) -> list[Cause]:
    m = e.material
    own = [
        *map_missing(m), *map_not_trained(m), *layer_ids(e), *rope(e), *options(e), *embeddings(e),
        *tensors(m), *rotary_table(m),
    ]  # fmt: skip
    told = {c.code for c in own}
    rest = [as_cause(f, 3) for f in m.export_findings if f.code not in told]
    # Of weights that are not the trained ones it means nothing what would mend them.
    better = [] if "export-differs" in told else mended(e, told)
    return own + [c for c in rest if c.severity == "error"] + better


def _cause(code: str, severity: Any, title: str, evidence: str, remedy: str, **more: Any) -> Cause:
    more.setdefault("command", _AGAIN)
    return Cause(code, severity, title, evidence, remedy, _WHERE, question=3, **more)


def best_mended(e: Evidence, code: str) -> Outcome | None:
    """The variant of a cause that gains most, if any gains beyond chance."""
    found = [
        o for o in e.mended_table[1:]
        if o.cause == code and o.gain > _LEAST_GAIN and o.gain > _SURE * o.gain_error
    ]  # fmt: skip
    return max(found, key=lambda o: o.gain, default=None)


def _proven(e: Evidence, code: str) -> dict[str, Any]:
    """Proof, cost and experiment of a cause whose mending was tried."""
    best = best_mended(e, code)
    if best is None or not e.mended_table:
        return {"experiment": "file against training"}
    exported = e.mended_table[0].acceptance_length or 1.0
    reached = best.acceptance_length or 1.0
    return {
        "proof": "shown", "cost": reached - exported,
        "experiment": f"simulated {exported:.2f} as exported, {reached:.2f} with {best.label}",
        "series": bars("Simulated acceptance length", "tokens a round",
                       {"as exported": exported, best.label: reached}),
    }  # fmt: skip


def mended(e: Evidence, told: set[str]) -> list[Cause]:
    """What gains when it is undone though no file says that it is wrong: a drafter whose training
    is not at hand, or a training that did what its config does not say."""
    found = []
    for code in dict.fromkeys(o.cause for o in e.mended_table[1:]):
        best = best_mended(e, code)
        if best is None or code in told:
            continue
        proven = _proven(e, code)
        found.append(
            _cause(
                code, "error", f"the drafter is better than its files say: with {best.label}",
                f"{proven['experiment']}; +{best.gain:.3f} +- {best.gain_error:.3f} a position",
                f"export it again as it was trained: {best.label}", **proven,
            )
        )  # fmt: skip
    return found


def map_missing(m: Material) -> list[Cause]:
    draft, whole = m.raw_config.get("draft_vocab_size"), m.target.vocab_size
    if not m.exported or "d2t" in m.exported or not draft or draft == whole:
        return []
    return [
        _cause(
            "map-missing", "error", f"the export has no d2t, though it drafts {draft} of {whole}",
            "vLLM takes ids 0 to D - 1 then and SGLang maps nothing, both silently",
            "export d2t and t2d within model.safetensors", experiment="tensor names of the export",
        )
    ]  # fmt: skip


def map_not_trained(m: Material) -> list[Cause]:
    """The exported map against the trained checkpoint's, or that of phase 03."""
    mine = m.exported.get("d2t")
    trained = m.trained.get("d2t", m.vocab.d2t if m.vocab else None)
    if mine is None or trained is None or any(f.code == "vocab-map" for f in m.export_findings):
        return []
    if mine.shape == trained.shape and torch.equal(mine, trained):
        return []
    same = sum(a == b for a, b in zip(_ids(mine), _ids(trained), strict=False))
    return [
        _cause(
            "map-not-trained", "error", "the exported map is not the one that was trained",
            f"{same} of {len(trained)} draft ids mean the token that they were trained for",
            "keep the map of the training: every row of lm_head belongs to one token",
            proof="shown", experiment="d2t of the export beside d2t of the training",
        )
    ]  # fmt: skip


def _ids(d2t: Tensor) -> list[int]:
    return (d2t + torch.arange(len(d2t))).tolist()


def layer_ids(e: Evidence) -> list[Cause]:
    m = e.material
    if m.drafter is None or m.store is None or m.drafter.config.slots == m.store.slots:
        return []
    return [
        _cause(
            "layer-ids-not-trained", "error",
            f"the export names slots {list(m.drafter.config.slots)}, trained were "
            f"{list(m.store.slots)}",
            "HF hidden_states indices; output-of-layer ids are one less",
            "write the ids of the training in the numbering of the place where they stand",
            **_proven(e, "layer-ids-not-trained"),
        )
    ]  # fmt: skip


def rope(e: Evidence) -> list[Cause]:
    """The export's rotary settings against the target's, which our training copies."""
    m = e.material
    if m.drafter is None:
        return []
    try:
        wanted = {"rope_type": "default"} | rope_parameters(m.target.config, "the target's config")
    except UserError:
        return []
    mine = m.drafter.config.rope_parameters
    differs = {
        k: (mine.get(k), wanted.get(k)) for k in {*mine, *wanted} if mine.get(k) != wanted.get(k)
    }
    trained_here = bool(m.trained)
    if not differs or not (trained_here or best_mended(e, "rope-not-trained")):
        return []
    said = ", ".join(f"{k} {a} (target {b})" for k, (a, b) in sorted(differs.items()))
    return [
        _cause(
            "rope-not-trained", "error", f"the export's rotary embedding is another: {said}",
            "the training turns positions as the target does",
            "write the target's rope_theta and scaling into config.json, in both spellings",
            **_proven(e, "rope-not-trained"),
        )
    ]  # fmt: skip


def options(e: Evidence) -> list[Cause]:
    m = e.material
    if m.drafter is None or not m.trained:
        return []
    trained = {name: bool(m.training_params.get(name, False)) for name in OPTIONS}
    exported = {name: bool(getattr(m.drafter.config, name)) for name in OPTIONS}
    wrong = [name for name in OPTIONS if trained[name] != exported[name]]
    if not wrong:
        return []
    return [
        _cause(
            "option-not-trained", "error",
            f"the export says {', '.join(f'{n}={exported[n]}' for n in wrong)}; it was trained "
            "without" if exported[wrong[0]] else f"the export lacks {', '.join(wrong)}",
            "an option changes the forward; nothing in the weights' shapes shows it",
            "export the options of the training", **_proven(e, "option-not-trained"),
        )
    ]  # fmt: skip


def embeddings(e: Evidence) -> list[Cause]:
    """Embeddings of its own in a drafter whose training kept the target's."""
    m = e.material
    own = m.exported.get("embed_tokens.weight")
    if own is None or own.shape != m.head.embedding.shape:
        return []
    a, b = own.float(), m.head.embedding.float()
    alike = torch.cosine_similarity(a, b, dim=-1).median()
    trained_own = "embed_tokens.weight" in m.trained
    if alike > 0.99 or trained_own:
        return []
    return [
        _cause(
            "embeddings-not-targets", "error",
            f"the exported embeddings are not the target's (median cosine {alike:.2f})",
            "SGLang replaces them by the target's, vLLM keeps them: one engine is right by chance",
            "leave embed_tokens out of the export, or copy the target's",
            **_proven(e, "embeddings-not-targets"),
        )
    ]  # fmt: skip


def tensors(m: Material) -> list[Cause]:
    """Every exported tensor against the best checkpoint, up to the export's rounding."""
    wrong = []
    for name, trained in m.trained.items():
        mine = m.exported.get(name)
        if mine is None or not trained.is_floating_point() or name.startswith("embed_tokens"):
            continue
        if mine.shape != trained.shape:
            wrong.append((name, 1.0))
            continue
        error = (mine.float() - trained.float()).norm() / trained.float().norm().clamp(min=1e-12)
        if error > _ROUNDING:
            wrong.append((name, float(error)))
    if not wrong:
        return []
    shown = ", ".join(f"{name} ({error:.0%})" for name, error in wrong[:4])
    return [
        _cause(
            "export-differs", "error",
            f"{len(wrong)} of {len(m.trained)} exported tensors are not the trained ones",
            f"relative difference: {shown}",
            "export from the best checkpoint, with strict loading", proof="shown",
            experiment="every tensor of the export beside the best checkpoint's",
            rows=rows_of("tensor", ((name, f"{error:.0%} away") for name, error in wrong)),
        )
    ]  # fmt: skip


def rotary_table(m: Material) -> list[Cause]:
    limit = m.raw_config.get("max_position_embeddings")
    longest = max(
        (len(r.prompt_token_ids) + len(r.answer_token_ids) for r in m.requests), default=0
    )
    if not limit or longest + (m.steps or 0) <= limit:
        return []
    return [
        _cause(
            "short-rotary-table", "error",
            f"the drafter's rotary table ends at {limit} positions, {longest} tokens were served",
            "beyond it an engine reads past the table, or asserts on the device",
            "write the target's max_position_embeddings; the table is made from it",
            proof="shown", experiment="max_position_embeddings against the longest conversation",
        )
    ]  # fmt: skip
