"""What is left out while reading: near duplicates, the reject file, and when the run stops."""

import json
import random

import pytest

from eagle3lib.data.near import drop_near_duplicates, similarity, word_ngrams
from eagle3lib.data.phase import load_prompt_sets
from eagle3lib.data.prompts import (
    NEAR_DUPLICATE,
    Prompt,
    Reject,
    prompt_id,
    read_source,
    write_read_rejects,
)
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_jsonl
from eagle3lib.lab.params import GenerateParams

WORDS = [f"w{i}" for i in range(24)]


def text(*changes):
    """24 words, so 20 5-grams; a word changed in the middle changes five of them."""
    words = list(WORDS)
    for index in changes:
        words[index] = f"other{index}"
    return " ".join(words)


def prompt_of(content, **before):
    messages = [{"role": role, "content": said} for role, said in before.items()]
    messages.append({"role": "user", "content": content})
    return Prompt(prompt_id(messages), tuple(messages), "workload")


def write(path, *texts):
    path.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts), encoding="utf-8")
    return path


def kept(files):
    return [[p.messages[-1]["content"] for p in file.prompts] for file in files]


@pytest.mark.parametrize(
    ("other", "share"),
    [
        (text(), 1.0),
        (text().upper() + "!", 1.0),
        (text(12), 15 / 25),
        (text(23), 19 / 21),
        (text() + " more", 20 / 21),
        (text(*range(24)), 0.0),
        ("", 0.0),
    ],
)
def test_similarity_is_the_share_of_common_five_grams(other, share):
    grams = [word_ngrams(prompt_of(t)) for t in (text(), other)]
    assert similarity(*grams) == share


def test_grams_are_of_what_is_asked_not_of_the_prompt_that_stands_before_every_row():
    plain = word_ngrams(prompt_of("a b c d e f"))
    assert plain == {"a b c d e", "b c d e f"}
    assert word_ngrams(prompt_of("a b c d e f", system=text())) == plain
    assert word_ngrams(prompt_of("two words")) == {"two words"}
    assert word_ngrams(prompt_of("中文没有空格")) == {"中 文 没 有 空", "文 没 有 空 格"}
    assert word_ngrams(prompt_of("?! 🙂")) == set()


def by_least_id(texts, least):
    """What stays, the slow way: in the order of ids, whatever is not close to one that stays."""
    stays = []
    for prompt in sorted(map(prompt_of, texts), key=lambda p: p.id):
        grams = word_ngrams(prompt)
        if all(similarity(grams, word_ngrams(other)) < least for other in stays):
            stays.append(prompt)
    return {p.messages[-1]["content"] for p in stays}


@pytest.mark.parametrize("least", [0.3, 0.6, 0.61, 0.9])
def test_which_near_duplicate_stays_is_decided_by_content_never_by_the_files_order(tmp_path, least):
    """A shuffled file once gave another training set: the first of a pair stayed."""
    texts = [text(), text(12), text(23), "short", "?", "!", text(4, 9, 14, 19), text(3), text(3, 4)]
    expected = by_least_id(texts, least)
    assert len(expected) < len(texts) or least == 0.9
    for seed in range(6):
        shuffled = random.Random(seed).sample(texts, len(texts))
        file = read_source(write(tmp_path / "a.jsonl", *shuffled), "workload")
        (left,) = drop_near_duplicates([file], least)
        (rows,) = kept([left])
        assert set(rows) == expected
        assert rows == [t for t in shuffled if t in expected]  # what stays keeps its place


def test_a_near_duplicate_says_which_one_stays(tmp_path):
    first, second = sorted([text(), text(12)], key=lambda t: prompt_of(t).id)
    file = read_source(write(tmp_path / "a.jsonl", second, "short", first), "workload")
    (left,) = drop_near_duplicates([file], 0.6)
    (reject,) = left.rejects
    assert (reject.where, reject.reason) == ("a.jsonl:1", NEAR_DUPLICATE)
    assert reject.detail == f"similarity 0.60 to {prompt_of(first).id} at a.jsonl:3"
    assert left.summary() == "a.jsonl: prompt, 3 rows; 1 x near-duplicate prompt"
    assert drop_near_duplicates([file], 0) == [file]  # nothing was changed in it


def test_at_similarity_one_only_case_and_marks_may_differ(tmp_path):
    texts = [text(), text(23), text().title()]
    file = read_source(write(tmp_path / "a.jsonl", *texts), "workload")
    ((first, second),) = kept(drop_near_duplicates([file], 1.0))
    assert {first.lower(), second.lower()} == {text(), text(23)}


def test_no_near_duplicates_are_on_both_sides(tmp_path):
    """Also not one in each file; an equal prompt in both is left to the split, as ever."""
    texts = [f"{i} {text(i)} {i}" for i in range(24)]
    workload = write(tmp_path / "w.jsonl", *texts[:12], "its own question")
    general = write(tmp_path / "g.jsonl", *texts[12:], "its own question", "another one")
    files = [read_source(workload, "workload"), read_source(general, "general")]
    first, second = kept(drop_near_duplicates(files, 0.25))
    least = min(texts[:12], key=lambda t: prompt_of(t).id)
    assert first == [least, "its own question"] and second == ["its own question", "another one"]


def params(folder, **values):
    values = {"heldout_general": 0, "workload": str(folder / "w.jsonl")} | values
    return GenerateParams(**values)


def test_what_was_left_out_is_on_disk_with_its_place_beside_what_the_server_refused(tmp_path):
    folder = tmp_path / "phase"
    folder.mkdir()
    refused = {**Reject("workload", "empty answer", "1234").as_dict()}
    (folder / "rejects.jsonl").write_text(json.dumps(refused) + "\n" + '{"torn')
    texts = [text(), text(), text(23), "\u2028"]
    write(tmp_path / "w.jsonl", *texts)
    cfg = params(tmp_path, max_reject_share=0.5, near_duplicate_similarity=0.9)
    for _ in range(2):  # a second start puts its lines in place of the first one's
        sets = load_prompt_sets(cfg, folder)
        *rows, last = read_jsonl(folder / "rejects.jsonl")
        assert last == refused
        assert [(r["where"], r["reason"]) for r in rows] == [
            (r.where, r.reason) for r in sets.rejects
        ]
    near = 1 if prompt_of(text(23)).id < prompt_of(text()).id else 3
    assert {(r["where"], r["reason"]) for r in rows} == {
        ("w.jsonl:2", "duplicate prompt"), (f"w.jsonl:{near}", "near-duplicate prompt"),
        ("w.jsonl:4", "an empty message"),
    }  # fmt: skip
    # The id of a duplicate is that of the prompt that stays: it must not count as refused.
    assert {r["id"] for r in rows} == {""} and {r["stage"] for r in rows} == {"reading"}
    assert sets.notes == (
        "w.jsonl: prompt, 4 rows; 1 rejected; 1 x duplicate prompt; 1 x near-duplicate prompt",
    )
    write_read_rejects(folder, [])
    assert read_jsonl(folder / "rejects.jsonl") == [refused]


def test_a_detail_that_quotes_half_an_emoji_can_be_written_and_read_again(tmp_path):
    (tmp_path / "w.jsonl").write_text(
        '{"prompt": "x"}\n{"messages": [{"role": "\\ud83d", "content": "x"}]}\n{"\\ud83d": 1}\n'
    )
    rejects = load_prompt_sets(params(tmp_path, max_reject_share=1.0), tmp_path).rejects
    for _ in range(2):
        assert [r["detail"] for r in read_jsonl(tmp_path / "rejects.jsonl")] == [
            "found \ud83d", "found \ud83d",
        ]  # fmt: skip
        write_read_rejects(tmp_path, rejects)


@pytest.mark.parametrize(("bad", "stops"), [(0, False), (2, False), (3, True)])
def test_the_run_stops_when_too_large_a_share_is_rejected_and_says_why(tmp_path, bad, stops):
    """Duplicates are no fault: ten of them beside eight good rows change no share."""
    texts = [f"question {i}" for i in range(8)]
    write(tmp_path / "w.jsonl", *texts, *[texts[0]] * 10, *[""] * bad)
    if not stops:
        assert len(load_prompt_sets(params(tmp_path), tmp_path / "phase").rejects) == 10 + bad
        return
    message = r"3 of 11 rows of w\.jsonl were rejected: 3 x an empty message; the first at w.*:19"
    with pytest.raises(UserError, match=rf"{message}(?s:.)*20%(?s:.)*rejects\.jsonl"):
        load_prompt_sets(params(tmp_path), tmp_path / "phase")
    assert len(read_jsonl(tmp_path / "phase" / "rejects.jsonl")) == 13


def test_each_file_answers_for_its_own_rows(tmp_path):
    """A large good file must not hide that nothing of a small one is usable."""
    write(tmp_path / "w.jsonl", *[f"question {i}" for i in range(100)])
    write(tmp_path / "g.jsonl", "one", "", "", "")
    cfg = params(tmp_path, heldout_general=5, general=str(tmp_path / "g.jsonl"))
    with pytest.raises(UserError, match=r"3 of 4 rows of g\.jsonl"):
        load_prompt_sets(cfg)


def test_format_and_length_are_parameters(tmp_path):
    path = write(tmp_path / "w.jsonl", "a", "bb", "ccc")
    cfg = params(tmp_path, max_prompt_chars=2, max_reject_share=1.0)
    (reject,) = load_prompt_sets(cfg).rejects
    assert (reject.where, reject.reason) == ("w.jsonl:3", "longer than 2 characters")
    with pytest.raises(UserError, match=r"no usable prompt in 3 rows; first reason: no text"):
        load_prompt_sets(params(tmp_path, prompt_format="text"))
    assert path.exists()
