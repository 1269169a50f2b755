"""Files are whole or not there, whenever the writer dies; fingerprints see what they promise to."""

import ctypes
import json
import shutil

import pytest

from eagle3lib.lab import files
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import (
    hash_file,
    hash_files,
    hash_json,
    read_json,
    read_jsonl,
    replace_folder,
    write_atomic,
    write_json,
    write_text,
)


class Killed(BaseException):
    """Stands for anything that ends a writer half-way: an error, Ctrl-C, a full disk."""


def test_a_failing_write_leaves_the_old_content_and_no_litter(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "old")

    def half(temporary):
        temporary.write_text("ne")
        raise Killed

    with pytest.raises(Killed):
        write_atomic(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_new_content_is_not_seen_under_the_name_before_it_is_whole(tmp_path):
    path = tmp_path / "deep" / "a.txt"

    def write(temporary):
        temporary.write_text("half")
        assert not path.exists()
        temporary.write_text("whole")

    write_atomic(path, write)
    assert path.read_text() == "whole"


def test_who_reads_while_a_file_is_replaced_reads_the_old_one_to_its_end(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with path.open() as reader:
        write_text(path, "new and longer")
        assert reader.read() == "old"
    assert path.read_text() == "new and longer"


def test_json_that_other_languages_cannot_read_is_not_written(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"loss": 1.0})
    with pytest.raises(ValueError):
        write_json(path, {"loss": float("nan")})
    assert read_json(path) == {"loss": 1.0}


@pytest.mark.parametrize("content", [None, b"", b'{"a": ', b"\xff\xfe{}"])
def test_a_missing_or_broken_json_file_is_a_user_error_that_names_it(tmp_path, content):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.json"):
        read_json(path)


ROWS = [{"n": 1, "text": "a\u2028b\u2029c\u0085d"}, {"n": 2, "text": "🙂 tab\t\n\r\x0b\x0c\x1c"}]
WHOLE = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def test_rows_holding_other_line_separators_survive(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(WHOLE)
    assert read_jsonl(path) == ROWS
    assert path.read_bytes() == WHOLE


def test_a_line_torn_at_any_byte_is_dropped_and_the_file_healed(tmp_path):
    """Healed: what is appended next starts on a line of its own."""
    path = tmp_path / "rows.jsonl"
    first = WHOLE.index(b"\n") + 1
    for cut in range(first, len(WHOLE)):
        path.write_bytes(WHOLE[:cut])
        assert read_jsonl(path) == ROWS[:1]
        assert path.read_bytes() == WHOLE[:first]
    with path.open("ab") as file:
        file.write(WHOLE[first:])
    assert read_jsonl(path) == ROWS


def test_no_file_means_no_rows(tmp_path):
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_a_failing_build_leaves_the_old_folder_and_no_litter(tmp_path):
    folder = tmp_path / "model"
    replace_folder(folder, lambda f: (f / "a").write_text("old"))

    def half(temporary):
        (temporary / "a").write_text("ne")
        raise Killed

    with pytest.raises(Killed):
        replace_folder(folder, half)
    assert (folder / "a").read_text() == "old"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_replaced_folder_holds_nothing_of_the_old_one(tmp_path):
    folder = tmp_path / "model"
    replace_folder(folder, lambda f: (f / "old").write_text("old"))
    replace_folder(folder, lambda f: (f / "new").write_text("new"))
    assert [p.name for p in folder.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "renameat2"), reason="no exchange here")
def test_a_reader_finds_a_folder_at_every_instant(tmp_path, monkeypatch):
    """Two renames left none between them: no step may move the folder away or put it there."""
    folder = tmp_path / "model"
    replace_folder(folder, lambda f: (f / "a").write_text("old"))

    def moved(path, to):
        raise AssertionError(f"{path} was renamed to {to}")

    monkeypatch.setattr(files.Path, "rename", moved)
    replace_folder(folder, lambda f: (f / "a").write_text("new"))
    assert (folder / "a").read_text() == "new"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_is_replaced_where_the_system_cannot_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: object())
    folder = tmp_path / "model"
    for text in ("old", "new"):
        replace_folder(folder, lambda f, text=text: (f / "a").write_text(text))
    assert (folder / "a").read_text() == "new"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_kill_while_the_old_folder_is_deleted_leaves_a_whole_one(tmp_path, monkeypatch):
    """Deleted under its own name it would be half a checkpoint that looks like a whole one."""
    folder = tmp_path / "model"
    names = ["a", "b"]

    def build(temporary):
        for name in names:
            (temporary / name).write_text("")

    replace_folder(folder, build)
    delete = shutil.rmtree

    def die_half_way(path, **_):
        if path.exists():
            next(path.iterdir()).unlink()
            raise Killed

    monkeypatch.setattr(files.shutil, "rmtree", die_half_way)
    with pytest.raises(Killed):
        replace_folder(folder, build)
    monkeypatch.setattr(files.shutil, "rmtree", delete)
    assert sorted(p.name for p in folder.iterdir()) == names


def test_a_small_file_is_fingerprinted_by_every_byte(tmp_path):
    path = tmp_path / "a"
    seen = set()
    for content in (b"abc", b"abd", b"bbc", b"acc", b"abcc", b""):
        path.write_bytes(content)
        seen.add(hash_file(path))
    assert len(seen) == 6


def test_a_large_file_is_fingerprinted_by_size_and_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_WHOLE_HASH_BYTES", 64)
    monkeypatch.setattr(files, "_EDGE_BYTES", 8)
    path = tmp_path / "a"

    def fingerprint(content):
        path.write_bytes(content)
        return hash_file(path)

    base = bytearray(100)
    first, last, middle = bytearray(base), bytearray(base), bytearray(base)
    first[0] = last[99] = middle[50] = 1
    assert len({fingerprint(c) for c in (base, first, last, base + b"\0")}) == 4
    assert fingerprint(middle) == fingerprint(base)  # the price of not reading it all
    middle_of_a_small_one = bytearray(60)
    middle_of_a_small_one[30] = 1
    assert fingerprint(middle_of_a_small_one) != fingerprint(bytearray(60))


def test_the_fingerprint_of_many_files_sees_names_and_content_but_no_order(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("1")
    b.write_text("2")
    before = hash_files([a, b], tmp_path)
    assert hash_files([b, a], tmp_path) == before
    assert hash_files([a], tmp_path) != before
    a.write_text("2")
    b.write_text("1")
    assert hash_files([a, b], tmp_path) != before


def test_a_folder_is_fingerprinted_by_what_it_holds_and_not_by_the_cache_in_it(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "data.arrow").write_text("a")
    before = files.hash_path(tmp_path / "rows")
    for name in ("cache-1234.arrow", ".lock", "README.md"):
        (tmp_path / "rows" / name).write_text("x")
    assert files.hash_path(tmp_path / "rows") == before
    (tmp_path / "rows" / "data.arrow").write_text("b")
    assert files.hash_path(tmp_path / "rows") != before
    data = tmp_path / "rows" / "data.arrow"
    assert files.hash_path(data) == files.hash_file(data)


def test_the_fingerprint_of_json_is_of_its_meaning():
    assert hash_json({"a": 1, "b": "é"}) == hash_json({"b": "é", "a": 1})
    assert hash_json({"a": 1}) != hash_json({"a": "1"})
