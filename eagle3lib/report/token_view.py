"""Answers token by token as one block of HTML: no network, no framework, a picture without scripts.

The data is gzipped JSON inside the block, about a sixth of the plain text; ``token_view.js`` draws
passages as they are scrolled to, so that a thousand answers open at once. Without scripts the worst
passages stand there, already drawn.
"""

from __future__ import annotations

import gzip
import html
import json
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from eagle3lib.diagnose.passages import PASSAGE_ROUNDS, Passage, passages
from eagle3lib.diagnose.predictions import (
    ACCEPTED,
    KINDS,
    AnswerView,
    Choice,
    Token,
    kind_counts,
    parted_rounds,
)
from eagle3lib.diagnose.predictions_run import RunViews
from eagle3lib.report.html import page_template

_HERE = Path(__file__).parent
_STATIC = 6  # passages that are drawn without scripts
_PROMPT_CHARS = 160
_BASE64 = 4 / 3  # bytes of text a packed byte
_LEAST_SHOWN = 0.005  # probability below which a choice after the first is left out
PAGE_BYTES = 10 * 10**6  # beside 5 MB that the page has for its figures


@dataclass(frozen=True)
class TokenView:
    """The block; ``left_out`` answers are counted but not drawn, for the page's size."""

    html: str
    left_out: int

    def _repr_html_(self) -> str:
        return self.html


def token_view(
    found: RunViews, decode: Callable[[list[int]], str], page_bytes: int = PAGE_BYTES
) -> TokenView:
    """Draw the answers, in the order of ``passages``. Where their packed data is beyond
    ``page_bytes`` the answers whose worst passage is least bad are left out, and the block says how
    many.

    A token takes 45 to 55 bytes, so 1,000 answers of 180 tokens fit; they take 10 to 15 s of CPU.
    """
    words = _Words(decode)
    kept, data = _kept(found.views, words, page_bytes)
    chosen = passages(kept)
    content = {
        "kinds": list(KINDS),
        "told": KINDS,
        "slots": "before layers " + ", ".join(str(s) for s in found.slots),
        "answers": data,
        "passages": [[p.answer, p.first, p.last, p.rounds, p.accepted] for p in chosen],
    } | words.as_dict(found.views)
    packed = gzip.compress(_json(content), mtime=0)  # without a time: equal answers, equal page
    name = "tv-" + sha256(packed).hexdigest()[:12]
    left_out = len(found.views) - len(kept)
    static = "".join(_passage(kept[p.answer], p, decode) for p in chosen[:_STATIC])
    return TokenView(_block(name, b64encode(packed).decode(), static, found, len(kept)), left_out)


class _Words:
    """Texts of all ids that are shown, each once."""

    def __init__(self, decode: Callable[[list[int]], str]):
        self.decode = decode
        self.place: dict[int, int] = {}

    def __call__(self, token: int) -> int:
        return self.place.setdefault(token, len(self.place))

    def as_dict(self, views: Sequence[AnswerView]) -> dict[str, Any]:
        inside = {t.id for v in views for t in v.tokens if t.inside}
        return {
            "ids": list(self.place),
            "words": [self.decode([i]) for i in self.place],
            "inside": "".join("1" if i in inside else "0" for i in self.place),
        }


def _kept(
    views: Sequence[AnswerView], words: _Words, page_bytes: int
) -> tuple[list[AnswerView], list[dict[str, Any]]]:
    order = dict.fromkeys([*(p.answer for p in passages(list(views))), *range(len(views))])
    kept, data, size, packer = [], [], 0, zlib.compressobj()
    for number in order:
        answer = _answer(views[number], words)
        # Flushed, to see the size: a little more than what all of it packs to at the end.
        size += len(packer.compress(_json(answer)) + packer.flush(zlib.Z_SYNC_FLUSH))
        if kept and size * _BASE64 > page_bytes:
            break
        kept.append(views[number])
        data.append(answer)
    return kept, data


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _answer(view: AnswerView, words: _Words) -> dict[str, Any]:
    prompt = words.decode(view.prompt_token_ids)[-_PROMPT_CHARS:]
    code = {kind: chr(97 + i) for i, kind in enumerate(KINDS)}
    return {
        "id": view.id,
        "set": view.set,
        "prompt": prompt,
        "rec": int(view.recorded),
        "problem": view.problem,
        "cut": int(view.ends_within_round),
        "accepted": sum(r.accepted for r in view.rounds),
        "k": "".join(code[t.kind] for t in view.tokens),
        "t": [words(t.id) for t in view.tokens],
        "d": [_choices(t.drafter, words) for t in view.tokens],
        "q": [_choices(t.target, words) for t in view.tokens],
        "dp": [None if t.drafter_p is None else round(1000 * t.drafter_p) for t in view.tokens],
        "qp": [round(1000 * t.target_p) for t in view.tokens],
        # start, accepted, width, 1: parted, 2: not compared, simulated, sizes by slot and by step
        "r": [
            [r.start, r.accepted, r.width, 2 if not r.compared else int(r.parted), r.simulated,
             r.state_rms, r.drafter_rms]
            for r in view.rounds
        ],
    }  # fmt: skip


def _choices(choices: Iterable[Choice], words: _Words) -> list[int]:
    shown = [c for i, c in enumerate(choices) if i == 0 or c[1] >= _LEAST_SHOWN]
    return [number for i, p in shown for number in (words(i), round(1000 * p))]


def _passage(view: AnswerView, part: Passage, decode: Callable[[list[int]], str]) -> str:
    """One passage, drawn without scripts; what hovering tells is in each token's title."""
    tokens = "".join(
        _span(view.tokens[i], view, decode)
        for i in range(0 if part.first == 1 else part.first, part.last + 1)
    )
    head = (
        f"{view.id} · {view.set} · tokens {part.first + 1} to {part.last + 1} of "
        f"{len(view.tokens)} · {part.length:.2f} tokens a round"
    )
    return f'<section><h4>{html.escape(head)}</h4><p class="text">{tokens}</p></section>'


def _span(token: Token, view: AnswerView, decode: Callable[[list[int]], str]) -> str:
    parted = view.recorded and token.round >= 0 and view.rounds[token.round].parted
    shade = f' style="--a:{min(0.16 + 0.13 * token.step, 0.68):.2f}"' * (token.kind == ACCEPTED)
    said = KINDS[token.kind] + (f", draft step {token.step}" if token.step else "")
    said += "" if token.inside else ", outside the draft vocabulary"
    for name, choices in (("drafter", token.drafter), ("target", token.target)):
        shown = ", ".join(f"{decode([i])!r} {p:.1%}" for i, p in choices)
        said += f"\n{name}: {shown}" if choices else ""
    if token.round >= 0:
        of = view.rounds[token.round]
        own = ", ".join(f"{x:.3g}" for x in of.drafter_rms)
        said += f"\nRMS of the target's states {', '.join(f'{x:.3g}' for x in of.state_rms)}"
        said += f"; of the drafter's by step {own}" if own else ""
    text = html.escape(decode([token.id]).replace("\n", "↵\n"))
    classes = f"t {token.kind}{' parted' * parted}"
    return f'<span class="{classes}"{shade} title="{html.escape(said)}">{text}</span>'


def _block(name: str, data: str, static: str, found: RunViews, kept: int) -> str:
    counts, (parted, compared) = kind_counts(found.views), parted_rounds(found.views)
    buttons = [(kind, kind, f"{KINDS[kind]}: {n:,}") for kind, n in counts.items() if n]
    if compared:
        told = f"rounds in which engine and simulator differ: {parted:,} of {compared:,}"
        buttons.append(("parted", "parted", told))
    css, script = ((_HERE / f"token_view.{s}").read_text(encoding="utf-8") for s in ("css", "js"))
    return page_template("token_view.html.j2").render(
        name=name,
        css=css,
        js=script.replace("TOKEN_VIEW_ID", name),
        data=data,
        static=static,
        buttons=buttons,
        sets=sorted({v.set for v in found.views}),
        passage_rounds=PASSAGE_ROUNDS,
        answers=f"{len(found.views):,}",
        left_out=len(found.views) - kept,
    )
