"""Sources: the same rows in any file give the same prompts; a bad row spoils itself alone."""

import csv
import json
import random

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from eagle3lib.data.prompts import prompt_id, read_prompts, read_source
from eagle3lib.data.read import read_rows
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import GenerateParams, hub_id

TOOL = {"type": "function", "function": {"name": "weather"}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TEXTS = [
    "plain", "line\nbreak\r\nand \u2028 \u2029 \u0085 \x0b\x1c", 'comma, "quote"', "🙂 é 中文",
    "x" * 200_000, " 12", "null", "[1]",
]  # fmt: skip
ROWS = [
    *({"messages": [{"role": "user", "content": text}]} for text in TEXTS),
    {"messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
    ]},
    {"messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sun"},
    ], "tools": [TOOL]},
]  # fmt: skip


def write_jsonl(path, rows):
    path.write_bytes(b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in rows))


def write_json(path, rows):
    path.write_text(json.dumps(rows), encoding="utf-8")


def write_object(path, rows):
    write_json(path, {"version": 1, "data": rows})


def filled(rows):
    """Every row with all columns: a table takes its columns from the first row alone."""
    return [{key: row.get(key) for key in {k: 0 for r in rows for k in r}} for row in rows]


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(filled(rows)), path)


def write_csv(path, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["messages", "tools"], restval="")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: json.dumps(value) for key, value in row.items()})


def write_folder(path, rows):
    datasets.Dataset.from_list(filled(rows)).save_to_disk(path)


def write_split_folder(path, rows):
    train, test = (datasets.Dataset.from_list(filled(part)) for part in (rows, rows[:1]))
    datasets.DatasetDict({"test": test, "train": train}).save_to_disk(path)


WRITERS = {
    "a.json": write_json, "b.json": write_object, "jsonl_by_another_name.json": write_jsonl,
    "a.parquet": write_parquet, "a.csv": write_csv, "folder": write_folder,
    "splits": write_split_folder,
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_any_source_gives_the_prompts_that_jsonl_gives(tmp_path, name):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    WRITERS[name](tmp_path / name, ROWS)
    expected, _ = read_prompts(tmp_path / "rows.jsonl", "workload")
    assert len(expected) == len(ROWS)
    found = read_source(tmp_path / name, "workload")
    assert found.prompts == expected and found.rejects == []
    assert [p.id for p in found.prompts] == [prompt_id(list(p.messages), p.tools) for p in expected]
    assert found.summary() == f"{name}: messages, {len(ROWS)} rows"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "folder"])
def test_rows_of_several_formats_may_stand_in_one_file(tmp_path, name):
    """Arrow gives each row the columns of all others, as nulls: they are not its own."""
    rows = [
        {"prompt": "a"}, {"prompt": "b"}, {"text": "c"},
        {"conversations": [{"from": "human", "value": "d"}, {"from": "gpt", "value": "e"}]},
        {"instruction": "f", "input": "g"}, {"prompt": None}, {"text": "[INST] h [/INST]"},
    ]  # fmt: skip
    (WRITERS | {"a.jsonl": write_jsonl})[name](tmp_path / name, rows)
    found = read_source(tmp_path / name, "workload")
    assert [p.messages[-1]["content"] for p in found.prompts] == ["a", "b", "c", "d", "f\n\ng"]
    kind = "" if name == "a.jsonl" else "row "
    assert [r.where for r in found.rejects] == [f"{name}:{kind}{n}" for n in (6, 7)]
    assert found.summary() == (
        f"{name}: prompt (2), text (1), conversations (1), instruction (1), 7 rows; 2 rejected; "
        "the last answer cut off in 1 rows"
    )


def test_a_shuffled_file_gives_the_same_ids_and_the_same_split(tmp_path):
    rows = [{"prompt": f"question {i}"} for i in range(200)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    random.Random(0).shuffle(rows)
    write_parquet(tmp_path / "b.parquet", rows)
    one, other = (
        {p.id: p.split for p in read_source(tmp_path / name, "workload").prompts}
        for name in ("a.jsonl", "b.parquet")
    )
    assert one == other and set(one.values()) == {"train", "heldout"}


def places(path):
    return [(row.where, row.problem) for row in read_rows(path)]


def test_the_mark_of_byte_order_is_no_part_of_the_first_row(tmp_path):
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\n')
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfprompt\nx\n")
    for name in ("a.jsonl", "a.json", "a.csv"):
        assert [row.value for row in read_rows(tmp_path / name)] == [{"prompt": "x"}]


def test_a_csv_row_is_found_by_the_line_on_which_it_starts(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'prompt,input\r\n"two\nlines",\r\n\r\n\xff,\nmore,cells,here\n"broken"x,\n,\nlast,y\n'
    )
    assert places(path) == [
        ("a.csv:2", ""),
        ("a.csv:5", "not UTF-8"),
        ("a.csv:6", "not as many cells as the header has"),
        ("a.csv:7", "not CSV: ',' expected after '\"'"),
        ("a.csv:8", ""),
        ("a.csv:9", ""),
    ]
    values = [row.value for row in read_rows(path) if not row.problem]
    assert values == [{"prompt": "two\nlines"}, {}, {"prompt": "last", "input": "y"}]


def test_a_quote_that_is_never_closed_does_not_swallow_the_file(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt\nfine\n"open\n' + "lost\n" * 50)
    with pytest.raises(UserError, match=r"a\.csv:3 is never closed"):
        list(read_rows(path))
    assert csv.field_size_limit() < 2**20  # the limit of the process is what it was


def test_bytes_in_arrow_that_are_not_utf8_spoil_one_row(tmp_path):
    bad = pyarrow.array([b"a", b"\xff", b"c"]).cast(pyarrow.binary())
    column = pyarrow.StringArray.from_buffers(3, *bad.buffers()[1:])
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "a.parquet")
    assert places(tmp_path / "a.parquet") == [
        ("a.parquet:row 1", ""), ("a.parquet:row 2", "not UTF-8"), ("a.parquet:row 3", ""),
    ]  # fmt: skip


def test_a_value_that_json_cannot_hold_is_a_reason(tmp_path):
    message = {"role": "user", "content": "x", "raw": b"\x00"}
    write_parquet(tmp_path / "a.parquet", [{"messages": [message]}, {"messages": [{**message}]}])
    found = read_source(tmp_path / "a.parquet", "workload")
    assert {r.reason for r in found.rejects} == {"a value that JSON can't hold"}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b"{}", "not a list of rows: dict"),
        ("a.json", b'{"a": [], "b": []}', "not a list of rows"),
        ("a.json", b"[{", "not JSON"),
        ("a.json", b'["\xff"]', "not UTF-8"),
        ("a.parquet", b"PAR1", "not readable as Parquet"),
        ("a.parquet", b"", "not readable as Parquet"),
        ("a.csv", b"", "no usable prompt"),
        ("a.csv", b"prompt\n", "no usable prompt"),
        ("a.json", b"[]", "no usable prompt"),
        ("folder/x.jsonl", b"{}", "not a saved datasets folder"),
        ("other/none.jsonl", None, "there is no file of prompts"),
    ],
)
def test_a_source_that_is_not_what_it_says_is_one_user_error(tmp_path, name, content, reason):
    path = tmp_path / name
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    source = path.parent if "folder" in name else path
    with pytest.raises(UserError, match=f"{reason}(?s:.)*{source.name}"):
        read_prompts(source, "workload")


def test_a_json_file_of_one_row_is_one_row(tmp_path):
    write_json(tmp_path / "a.json", {"messages": [{"role": "user", "content": "x"}]})
    assert len(read_prompts(tmp_path / "a.json", "workload")[0]) == 1


def test_splits_without_train_are_named(tmp_path):
    parts = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("dev", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    with pytest.raises(UserError, match=r"\['dev', 'test'\]"):
        read_prompts(tmp_path / "d", "workload")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("hub:ORG/NAME", "ORG/NAME"), ("Org/some_set-1.0", "Org/some_set-1.0"),
        ("params/some.jsonl", ""), ("params/prompts", ""), ("data/x.parquet", ""), ("/a/b", ""),
        ("./a/b", ""), ("~/a", ""), ("a/b/c", ""), ("rows", ""), ("", ""),
    ],
)  # fmt: skip
def test_what_is_a_name_on_the_hub_and_what_a_path(value, name):
    assert hub_id(value) == name
    cfg = GenerateParams(workload=value, general="")
    assert bool(cfg.input_files()) == (bool(value) and not name)


def test_the_hubs_rows_are_its_train_split(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return datasets.Dataset.from_list([{"prompt": "x", "score": 1.0}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = read_source("hub:ORG/NAME", "workload")
    assert asked == [("ORG/NAME", "train")] and found.summary() == "ORG/NAME: prompt, 1 rows"
    assert found.places[found.prompts[0].id] == "ORG/NAME:row 1"


def test_the_hub_without_a_network_is_one_user_error(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"could not load 'org/none' from the Hub(?s:.)*next:"):
        read_prompts("org/none", "workload")
