"""The token view holds every answer, obeys no text of theirs, and stays small."""

from __future__ import annotations

import gzip
import json
import random
import re
import time
from base64 import b64decode
from dataclasses import replace

import pytest
from browser import CHROMIUM, open_browser

from eagle3lib.diagnose.predictions import (
    ACCEPTED,
    FIRST,
    OUTSIDE,
    PREFILL,
    AnswerView,
    Round,
    Token,
)
from eagle3lib.diagnose.predictions_run import RunViews
from eagle3lib.report.token_view import token_view

EVIL = 7  # this token's text is markup


def decode(ids):
    return "".join("</script><b>x</b>" if i == EVIL else f" w{i}" for i in ids)


def view(number, tokens=120):
    """Round by round: one accepted draft, then a miss at the second step."""
    top = [(i, 0.9 / (i + 1)) for i in (number % 50, EVIL, 5, 6, 8)]
    sizes = [1.5, 2.5, 3.5], [4.5, 5.5, 6.5]
    rounds = [Round(at, 1, 3, 1, True, *sizes) for at in range(0, tokens - 2, 2)]
    made = [Token(number % 50, PREFILL, 0, -1, True, 0.9, top, None, [])]
    for r in range(len(rounds)):
        for step, kind in ((1, ACCEPTED), (2, FIRST)):
            made.append(Token((r + step) % 50, kind, step, r, True, 0.8, top, 0.4, top))
    return AnswerView(f"a{number}", "workload", [1, 2], made, rounds, True, "")


def views(count):
    return RunViews([view(i) for i in range(count)], count, 3, "float32", (2, 5, 7), "served")


def data_of(block):
    (packed,) = re.findall(r'<script type="text/plain">(.*?)</script>', block, re.DOTALL)
    return json.loads(gzip.decompress(b64decode(packed)))


def test_every_token_and_round_is_in_the_data():
    data = data_of(token_view(views(3), decode).html)
    for answer in data["answers"]:
        assert len(answer["t"]) == len(answer["k"]) == 119
        assert len(answer["r"]) == 59
        assert answer["r"][0] == [0, 1, 3, 0, 1, [1.5, 2.5, 3.5], [4.5, 5.5, 6.5]]
    assert len(data["passages"]) == 3 * 7


def test_the_text_of_an_answer_is_shown_and_not_obeyed():
    block = token_view(views(1), decode).html
    assert "<b>x</b>" not in block and block.count("<script") == block.count("</script>") == 2


def varied(number, tokens=180):
    """An answer that packs as badly as a real one: random tokens, choices, probabilities and
    outcomes."""
    draw = random.Random(number)

    def choices():
        p, found = draw.uniform(0.2, 0.9), []
        for _ in range(5):
            found.append((int(draw.paretovariate(0.6)) % 32_000, p))
            p *= draw.uniform(0.1, 0.6)
        return found

    def sizes():
        return [float(f"{draw.lognormvariate(1, 0.3):.3g}") for _ in range(3)]

    made, rounds = [Token(9, PREFILL, 0, -1, True, 0.9, choices(), None, [])], []
    while len(made) < tokens:
        accepted = min(draw.choice((0, 0, 0, 1, 1, 2)), tokens - 1 - len(made))
        rounds.append(Round(len(made) - 1, accepted, 3, accepted, True, sizes(), sizes()))
        for step in range(1, accepted + 2):
            kind = ACCEPTED if step <= accepted else draw.choice((FIRST, OUTSIDE))
            target, p = choices(), draw.random()
            made.append(
                Token(target[0][0], kind, step, len(rounds) - 1, kind != OUTSIDE, p, target,
                      draw.random(), choices())
            )  # fmt: skip
    name = ("workload", "general")[number % 2]
    return AnswerView(f"a{number}", name, [1, 2], made, rounds, True, "")


def thousand():
    return RunViews([varied(i) for i in range(1000)], 1000, 3, "float32", (2, 5, 7), "served")


def test_a_thousand_answers_are_all_there_in_10_mb(tmp_path):
    found = thousand()
    began = time.process_time()
    whole = token_view(found, decode)
    took_s = time.process_time() - began
    assert whole.left_out == 0 and len(whole.html.encode()) < 10.1e6
    assert took_s < 120  # about 12 s here; what grows with the square of the answers takes minutes
    if CHROMIUM is None:
        return
    page = tmp_path / "view.html"
    page.write_text(f'<!doctype html><meta charset="utf-8">{whole.html}')
    with open_browser() as tab:
        tab.open(page, 1280)
        tab.wait_for("document.querySelectorAll('.list section').length", lambda n: n >= 20)
        spans = "document.querySelectorAll('.list .t').length"
        assert tab.find(spans) < 4000  # of 180,000: the rest is drawn when scrolled to
        timed = "(b => { const t = performance.now(); b(); return performance.now() - t })"
        press = "() => document.querySelector('button[data-kind=outside]').click()"
        took_ms = tab.find(f"{timed}({press})")
        assert took_ms < 3000  # about 100 ms here
        assert 0 < tab.find(spans) < 4000
        assert tab.messages == []


def test_what_does_not_fit_is_left_out_and_counted():
    small = token_view(views(40), decode, page_bytes=5_000)
    kept = len(data_of(small.html)["answers"])
    assert small.left_out == 40 - kept > 0 and kept > 0
    assert f"{small.left_out} of 40 answers" in small.html


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on this machine")
def test_it_is_read_with_the_mouse_the_keys_or_no_script(tmp_path):
    page = tmp_path / "view.html"
    found = views(60)
    found.views[30] = replace(found.views[30], set="general")
    page.write_text(f'<!doctype html><meta charset="utf-8">{token_view(found, decode).html}')
    with open_browser() as tab:
        tab.ask("Emulation.setFocusEmulationEnabled", enabled=True)
        tab.open(page, 1280)
        drawn = "document.querySelectorAll('.list section').length"
        tab.wait_for(drawn, lambda n: n >= 20)
        assert tab.messages == [] and len(tab.requests) == 1
        assert tab.find("document.documentElement.scrollWidth") <= 1280
        tab.find("document.querySelector('.list .t[tabindex=\"0\"]').focus()")
        tip = (
            "document.querySelector('.tip').hidden ? '' : document.querySelector('.tip').innerText"
        )
        first = tab.find(tip)
        tab.press("ArrowRight", 39)
        after = tab.find(tip)
        assert first and after and first != after
        for word in ("drafter", "target", "draft vocabulary", "</script><b>x</b>"):
            assert word in after
        assert "RMS of the target" in after and "by step: 4.5, 5.5, 6.5" in after
        tab.press("Escape", 27)
        assert tab.find(tip) == ""
        tab.find("document.querySelector('button[data-kind=first]').click()")
        assert tab.find("document.querySelectorAll('.list .hit').length") > 0
        tab.find("(s => { s.value = 'general'; s.dispatchEvent(new Event('change')) })"
                 "(document.querySelector('.set'))")  # fmt: skip
        assert tab.find(drawn) == 7
