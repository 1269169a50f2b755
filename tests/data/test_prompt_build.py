"""The large prompt set: pinned wheels, templates, and no leak into what is held out."""

import hashlib
import json
import zipfile

import pytest

from eagle3lib.data.messages import request_of
from eagle3lib.data.prompt_build import SHARED_RUN, part, row_of, write
from eagle3lib.data.prompt_sources import Ask, Wheels
from eagle3lib.data.prompt_templates import MATERIAL, code_and_prose, writing
from eagle3lib.data.prompts import Prompt, read_source
from eagle3lib.lab.errors import UserError

CAPS = {"code": 3, "summaries": 2, "translation": 2, "rewriting": 2}
PROSE = "\n\n".join(
    f"Paragraph {i} says something of its own about topic number {i}, at such a length that "
    f"it may be summarised, translated or rewritten as item {i}." for i in range(5)
)  # fmt: skip
MODULE = f'"""{PROSE}"""\n' + "".join(
    f'def f{i}(x):\n    """Doc {i}."""\n    a = x\n    b = a\n    c = b\n    d = c\n    return d\n'
    for i in range(4)
)
WORDS = "apple\nbridge\ncandle\ndesert\neagle\nforest\ngarden\nharbour\n"


def ask(*turns, kind="chat"):
    return Ask(turns, kind, "a test", "MIT")


@pytest.fixture
def wheels(tmp_path):
    lock = tmp_path / "lock.txt"
    lines = []
    for name in [*MATERIAL, "wonderwords"]:
        path = tmp_path / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(
                f"{name}/m.py", MODULE if name == "sympy" else "import this_is_not_run"
            )
            archive.writestr(f"{name}/bad.py", "def ")
            for part_of_speech in ("noun", "adjective", "verb"):
                archive.writestr(f"wonderwords/assets/{part_of_speech}list.txt", WORDS)
            archive.writestr("wonderwords/assets/profanitylist.txt", "apple\n")
        lines.append(f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")
    lock.write_text("# pins\n" + "\n".join(lines) + "\n")
    return Wheels(tmp_path, lock)


def test_a_wheel_that_is_not_the_pinned_one_is_refused(wheels, tmp_path):
    (tmp_path / "sympy-1.0-py3-none-any.whl").write_bytes(b"another")
    with pytest.raises(UserError, match="another file of sympy"):
        wheels.open("sympy")
    (tmp_path / "sympy-1.0-py3-none-any.whl").unlink()
    with pytest.raises(UserError, match="no wheel of sympy"):
        wheels.open("sympy")


def test_material_is_used_once_and_the_same_seed_asks_the_same(wheels):
    asks = list(code_and_prose(wheels, CAPS))
    assert asks == list(code_and_prose(wheels, CAPS))
    assert [a.kind for a in asks] == ["code"] * 3 + ["summaries"] * 2 + ["translation"] * 2 + [
        "rewriting"
    ]  # the fifth paragraph is the last
    material = [a.turns[0].split("\n\n", 1)[1] for a in asks]
    assert len(set(material)) == len(material)
    assert {(a.source, a.licence) for a in asks} == {("sympy 1.0", "BSD-3-Clause")}


def test_words_of_the_profanity_list_are_never_drawn(wheels):
    texts = [a.turns[0] for a in writing(wheels, 60)]
    assert texts == [a.turns[0] for a in writing(wheels, 60)]
    assert not any("apple" in text for text in texts)
    assert any("bridge" in text for text in texts)


def test_train_holds_nothing_of_the_held_out_and_all_is_counted():
    words = [f"w{i}" for i in range(40)]
    held = [ask(" ".join(words)), ask("first turn", "second turn")]
    near_one = ask(" ".join(["other", *words[:10], "new", *words[11:]]))
    twin = [f"v{i}" for i in range(60)]
    train = [
        ask(" ".join(words)),
        ask("before " * 30 + " ".join(words[:13]) + " after" * 30),
        near_one,
        ask("a short one of its own"),
        ask("a short one of its own"),
        ask(" ".join(twin)),
        ask(" ".join([*twin[:-1], "last"])),
        ask("x" * 4001),
        ask(" "),
    ]
    rows, heldout, left_out = part(train, held)
    assert len(heldout) == 2
    assert len(rows) == 2
    assert left_out["the same as a held-out prompt"] == 1
    assert left_out[SHARED_RUN] == 2
    assert left_out["near another train prompt"] == 1
    assert left_out["near a held-out prompt"] == 0
    assert left_out["duplicate prompt"] == left_out["empty"] == 1


def test_a_near_prompt_without_a_long_shared_run_is_left_out_too():
    words = [f"w{i}" for i in range(12)]
    rows, _, left_out = part([ask(" ".join([*words, "more"]))], [ask(" ".join(words))])
    assert rows == []
    assert left_out["near a held-out prompt"] == 1


def test_what_is_written_is_what_phase_01_reads_and_the_same_each_time(wheels, tmp_path):
    train, held, left = part(code_and_prose(wheels, CAPS), [ask("one", "two")])
    write(tmp_path / "a", wheels, train, held, left)
    write(tmp_path / "b", wheels, train, held, left)
    packed = (tmp_path / "a" / "train.jsonl.gz").read_bytes()
    assert packed == (tmp_path / "b" / "train.jsonl.gz").read_bytes()
    found = read_source(tmp_path / "a" / "train.jsonl.gz", "workload")
    assert [p.id for p in found.prompts] == [r["id"] for r in train] and not found.rejects
    general = read_source(tmp_path / "a" / "heldout.jsonl", "general")
    assert [m["role"] for m in general.prompts[0].messages] == ["user", "assistant", "user"]
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["sha256"]["train.jsonl.gz"] == hashlib.sha256(packed).hexdigest()
    assert manifest["train"]["prompts"] == sum(manifest["train"]["kind"].values()) == len(train)


def test_the_general_set_is_held_out_whatever_its_hash():
    prompts = [row_of(ask(str(i))) for i in range(50)]
    assert all(request_of(row, "auto", 100).format == "messages" for row in prompts)
    assert {Prompt(r["id"], (), "general").split for r in prompts} == {"heldout"}
    assert {Prompt(r["id"], (), "workload").split for r in prompts} == {"train", "heldout"}
