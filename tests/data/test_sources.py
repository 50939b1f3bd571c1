import json
from pathlib import Path

import datasets
import pytest

from treedraft.data import DataError, read_rows

ROWS = [{"prompt": "w1", "answer": "w2"}, {"prompt": "w3", "answer": "w4"}]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_json_lines_json_and_parquet_give_the_same_rows(tmp_path: Path):
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "a.parquet"))
    sources = [
        write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, ROWS)) + "\n\n"),
        write(tmp_path / "a.json", json.dumps(ROWS)),
        write(tmp_path / "b.json", json.dumps({"version": 1, "data": ROWS})),
        write(tmp_path / "lines.json", "\n".join(map(json.dumps, ROWS))),
        tmp_path / "a.parquet",
    ]
    assert [list(read_rows(source)) for source in sources] == [ROWS] * 5


def test_a_saved_dataset_is_read_by_split(tmp_path: Path):
    one = datasets.Dataset.from_list(ROWS[:1])
    datasets.DatasetDict([("train", datasets.Dataset.from_list(ROWS)), ("test", one)]).save_to_disk(tmp_path / "both")
    one.save_to_disk(str(tmp_path / "one"))
    assert list(read_rows(tmp_path / "both")) == ROWS
    assert list(read_rows(tmp_path / "both", split="test")) == ROWS[:1]
    assert list(read_rows(tmp_path / "one")) == ROWS[:1]
    with pytest.raises(DataError, match="no split 'dev': choose one of train, test"):
        read_rows(tmp_path / "both", split="dev")


def test_types_may_differ_between_the_rows_of_a_file(tmp_path: Path):
    rows = [{"x": [1]}, {"x": "[1]"}, {}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert list(read_rows(path)) == rows


def test_every_faulty_line_is_named_by_file_and_number(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", '{"x": 1}\n{"x": \n{"x": 2}\n[3]\n')
    with pytest.raises(DataError) as error:
        list(read_rows(path))
    assert f"{path}:2: not JSON" in str(error.value)
    assert f"{path}:4: expected an object, got list" in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", "\n \n", "has no rows"),
        ("a.json", "[]", "has no rows"),
        ("a.json", "{", "is not JSON"),
        ("a.json", '{"a": [], "b": []}', "lists found: a, b"),
        ("a.json", '[{"x": 1}, 2]', "record 2 is not an object"),
        ("a.parquet", "x", "is not a Parquet file"),
        ("a.txt", "x", "unknown kind of file '.txt'"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, content: str, message: str):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=message):
        list(read_rows(path))


def test_a_missing_file_and_a_plain_folder_are_refused_at_once(tmp_path: Path):
    with pytest.raises(DataError, match="no data at"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="was not written by datasets' save_to_disk"):
        read_rows(tmp_path)
