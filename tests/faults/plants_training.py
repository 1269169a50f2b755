"""How the faults of training and data are planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from plant import BENCH, DATA, MAP, STATES, TRAIN, Inapplicable, Plant, StoredAs
from safetensors.torch import load_file

from eagle3lib.data.rows import AnswerRow, read_answers
from eagle3lib.data.template import load_chat_template, thinking_arguments
from eagle3lib.drafter.vocab import build_vocab_map, count_tokens
from eagle3lib.lab.files import write_text
from eagle3lib.measure.arms import RequestRow, read_requests
from eagle3lib.target.states import StateEntry, StateStore

_ASKED_AGAIN = 24  # rows: each costs an answer of the target


def _requests(p: Plant) -> list[RequestRow]:
    return read_requests(p.folder / BENCH)


def _other_markers(p: Plant, ids: list[int]) -> list[int]:
    """The same text between other markers of the same length: states and spans still fit."""
    return (
        [(t + 7) % p.target.vocab_size for t in ids[:3]]
        + ids[3:-3]
        + [(t + 7) % p.target.vocab_size for t in ids[-3:]]
    )


def _stuck(x: torch.Tensor) -> torch.Tensor:
    x[len(x) // 3 : 2 * len(x) // 3] = x[len(x) // 3]
    return x


def _slot_of_zeros(x: torch.Tensor) -> torch.Tensor:
    x[:, 0] = 0
    return x


def _slots_moved(by: int) -> Callable[[Plant], None]:
    """States captured at other layers than their ids say: 1 is the layers' outputs."""

    def moved(p: Plant) -> None:
        slots = tuple(s + by for s in StateStore(p.folder / STATES / "states").slots)
        p.store(lambda e, ids, x: (e, ids, p.states_of(ids.tolist(), slots)))

    return moved


def _normed(p: Plant) -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        x[:, -1] = p.head.normed(x[:, -1].to(p.head.norm.dtype)).to(x.dtype)
        return x

    p.states(norm)


def _swapped(p: Plant) -> None:
    """Every conversation gets the states of the one before it in its shard."""
    kept: list[torch.Tensor] = []

    def swap(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.clone())
        other = kept[-2] if len(kept) > 1 else x.flip(0)
        return other[torch.arange(len(x)) % len(other)]

    p.states(swap)


def _prompt_tokens(by: int) -> Callable[[Plant], None]:
    return lambda p: p.index(lambda e: {"prompt_tokens": e.prompt_tokens + by})


def _flat_curve(p: Plant) -> None:
    """A training whose loss never moved, and the drafter as it began."""
    path = p.folder / TRAIN / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    first = next(r for r in rows if r["kind"] == "train")["steps"]
    for r in rows:
        if r["kind"] == "train":
            r["steps"] = first
    write_text(path, "".join(json.dumps(r) + "\n" for r in rows))
    shapes = torch.Generator().manual_seed(3)

    def fresh(t: dict[str, torch.Tensor]) -> None:
        for name, value in t.items():
            if value.ndim == 2 and "lm_head" not in name and "embed" not in name:
                noise = torch.randn(value.shape, generator=shapes) * 0.02
                t[name] = noise.to(value.dtype)

    _both_weights(p, fresh)
    p.record()


def _both_weights(p: Plant, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """The same change in the trained checkpoint and in the export."""
    best = f"{TRAIN}/checkpoints/best/drafter.safetensors"
    p.tensors(best, change)
    trained = load_file(p.folder / best)
    p.export(lambda t: t.update({k: v.to(t[k].dtype) for k, v in trained.items() if k in t}))


def _one_step(p: Plant) -> None:
    if p.benchmark()["num_speculative_tokens"] == 1:
        raise Inapplicable("one step is served")
    p.json(f"{TRAIN}/inputs.json", lambda i: i | {"params": i["params"] | {"steps": 1}})


def _few_answers(p: Plant) -> None:
    kept = {r.id for r in [r for r in read_answers(p.folder / DATA) if r.trained][:4]}
    p.trained(lambda r: r if r.id in kept else None)
    p.json(f"{TRAIN}/metrics.json", lambda m: m | {"trained_tokens": 4 * 60})
    generator = torch.Generator().manual_seed(5)

    def barely(t: dict[str, torch.Tensor]) -> None:
        for name, value in t.items():
            if value.ndim == 2 and "lm_head" not in name:
                noise = torch.randn(value.shape, generator=generator) * value.float().std()
                t[name] = (0.6 * value.float() + 0.8 * noise).to(value.dtype)

    _both_weights(p, barely)
    p.record()


def _off_policy(every: int) -> Callable[[Plant], None]:
    """Of so many trained answers one is other text: its words backwards, with their states."""

    def planted(p: Plant) -> None:
        ids = [r.id for r in read_answers(p.folder / DATA) if r.trained]
        other = set(ids[::every])
        p.trained(
            lambda r: replace(r, answer_token_ids=r.answer_token_ids[::-1]) if r.id in other else r
        )
        _capture_again(p)

    return planted


def _capture_again(p: Plant) -> None:
    """States and spans of the trained rows as they are now."""
    rows = {r.id: r for r in read_answers(p.folder / DATA) if r.trained}
    slots = StateStore(p.folder / STATES / "states").slots

    def said(e: StateEntry, ids: torch.Tensor, x: torch.Tensor) -> StoredAs | None:
        if e.id not in rows:
            return e, ids, x
        prompt, answer = rows[e.id].prompt_token_ids, rows[e.id].answer_token_ids
        made = replace(e, prompt_tokens=len(prompt))
        return made, torch.tensor(prompt + answer), p.states_of(prompt + answer, slots)

    p.store(said)


def _asked_otherwise(
    p: Plant, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], think: bool | None,
    **facts: Any,
) -> None:  # fmt: skip
    """The first trained prompts rendered otherwise and answered again; the others are left out."""
    rows = [r for r in read_answers(p.folder / DATA) if r.trained and r.messages]
    if not rows:
        raise Inapplicable("the run's rows have no messages")
    kept = {r.id for r in rows[:_ASKED_AGAIN]}
    way = thinking_arguments(think)
    template = load_chat_template(p.target.folder, p.target.stop_ids(), way)

    def asked(r: AnswerRow) -> AnswerRow | None:
        if r.id not in kept:
            return None
        messages = change(r.messages)
        ids = template.ids(template.render(messages, prompt=True, tools=r.tools or None))
        said = p.generate(ids, len(r.answer_token_ids))
        return replace(r, messages=messages, prompt_token_ids=ids, answer_token_ids=said, **facts)

    p.trained(asked)
    _capture_again(p)
    p.keep(lambda e: e["split"] == "heldout" or e["id"] in kept)


def _system(p: Plant) -> None:
    said = [{"role": "system", "content": "You answer in rhymes."}]
    _asked_otherwise(p, lambda m: said + [x for x in m if x["role"] != "system"], None)


def _thinking(p: Plant) -> None:
    facts = {"reasoning_kind": "complete", "sampling": {"thinking": "on"}}
    _asked_otherwise(p, lambda m: m, True, **facts)


def _half_covered(p: Plant) -> None:
    """The training's own map leaves out every second token that is served."""
    size = len(load_file(p.folder / MAP / "vocab_map.safetensors")["d2t"])
    served = count_tokens(r.answer_token_ids for r in _requests(p))
    ranked = [t for t, _ in served.most_common()]
    left_out = set(ranked[1::2])
    if p.target.vocab_size - len(left_out) < size:
        raise Inapplicable("the map holds nearly the whole vocabulary")
    others = [t for t in range(p.target.vocab_size) if t not in left_out]
    vocab = build_vocab_map(count_tokens([ranked[0::2]]), p.target.vocab_size, size,
                            (ranked[0::2] + others)[:size])  # fmt: skip
    old = load_file(p.folder / MAP / "vocab_map.safetensors")
    old_ids = torch.arange(size) + old["d2t"]
    at = {int(t): i for i, t in enumerate(old_ids)}

    def remap(t: dict[str, torch.Tensor]) -> None:
        head = p.head.head[vocab.target_ids].to(t["lm_head.weight"].dtype).clone()
        for i, token in enumerate(vocab.target_ids.tolist()):
            if token in at:
                head[i] = t["lm_head.weight"][at[token]]
        t.update({"lm_head.weight": head, "d2t": vocab.d2t, "t2d": vocab.t2d})

    vocab.save(p.folder / MAP / "vocab_map.safetensors")
    _both_weights(p, remap)
    p.export(lambda t: t.update(d2t=vocab.d2t, t2d=vocab.t2d))
    p.record()


def _short_answers(p: Plant) -> None:
    p.index(lambda e: {"tokens": min(e.tokens, e.prompt_tokens + 6)})
    lengths: dict[str, int] = {}
    for r in read_answers(p.folder / DATA):
        lengths[r.id] = 6
    p.trained(lambda r: replace(r, answer_token_ids=r.answer_token_ids[:6]))
    longest = 40
    p.keep(lambda e: e["split"] == "heldout" or e["tokens"] <= longest)


def _other_domain(p: Plant) -> None:
    """Trained answers use other words: every token moved to another part of the vocabulary."""

    def moved(r: AnswerRow) -> AnswerRow:
        size = p.target.vocab_size
        return replace(r, answer_token_ids=[(t + size // 2) % size for t in r.answer_token_ids])

    p.trained(moved)


TRAINING_PLANTS: dict[str, Callable[[Plant], None]] = {
    "F50": lambda p: p.states(torch.zeros_like, most=1),
    "F51": lambda p: p.states(lambda x: x.roll(1, 0)),
    "F52": lambda p: p.states(lambda x: x.roll(-1, 0)),
    "F53": _slots_moved(1),
    "F54": _normed,
    "F55": _swapped,
    "F56": lambda p: p.states(_stuck, most=1),
    "F57": _prompt_tokens(1),
    "F58": _prompt_tokens(-1),
    "F59": lambda p: p.index(lambda e: {"prompt_tokens": 1}),
    "F60": lambda p: p.index(lambda e: {"tokens": e.tokens - 1}),
    "F61": _one_step,
    "F62": _flat_curve,
    "F63": lambda p: p.cut(sorted((p.folder / STATES / "states").glob("*.safetensors"))[0]),
    "F64": lambda p: p.json(
        f"{STATES}/states/index.json", lambda i: i | {"target_fingerprint": "0123456789abcdef"}
    ),
    "F65": _off_policy(1),
    "F66": lambda p: p.trained(
        lambda r: replace(r, prompt_token_ids=_other_markers(p, r.prompt_token_ids))
    ),
    "F67": _thinking,
    "F68": _system,
    "F69": _half_covered,
    "F70": _few_answers,
    "F71": _short_answers,
    "F72": _other_domain,
    "F78": lambda p: p.states(_slot_of_zeros),
    "F79": _slots_moved(-1),
    "F80": _prompt_tokens(3),
    "F83": _off_policy(2),
}  # fmt: skip
