"""Tables, exactly: strings come out as they went in; every other value, row and header is refused with its place."""

import csv
import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.data import documents, records, understood
from narrowgauge.data.sources import columns_in
from narrowgauge.errors import ConfigError, DataError
from tests.raising import coded, raises

TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
).filter(str.strip)


@pytest.fixture
def file(tmp_path):
    def write(name: str, content: str | bytes):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def parquet(tmp_path):
    def write(**columns):
        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        return path

    return write


def read(path, column=None, **options):
    return [document.text for document in documents(path, column=column, **options)]


# JSONL


@given(st.lists(TEXT, min_size=1, max_size=5))
def test_jsonl_returns_the_strings_it_was_given(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"id": 3, "body": text}) + "\n" for text in texts), encoding="utf-8"
    )
    assert read(path) == texts


def test_jsonl_origin_is_file_and_line_and_blank_lines_and_texts_are_passed_over(file):
    path = file("a.jsonl", b'\xef\xbb\xbf{"text": "one"}\r\n\n{"text": ""}\n{"text": "two"}')
    assert [(d.text, d.origin) for d in documents(path)] == [
        ("one", f"{path}:1"),
        ("two", f"{path}:4"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": null}', coded("table.cell", "'text'", "null", ":2")),
        ('{"text": 5}', coded("table.cell", "'text'", "a number (5)", ":2")),
        ('{"text": NaN}', coded("table.cell", "'text'", "a number (nan)", ":2")),
        ('{"text": true}', coded("table.cell", "'text'", ":2")),
        ('{"text": ["a"]}', coded("table.cell", "'text'", "an array", ":2")),
        ('{"text": {"a": 1}}', coded("table.cell", "'text'", "an object", ":2")),
        (
            '{"texts": "a"}',
            coded("table.no-column", "'text'", "Closest: 'texts'.", ":2"),
        ),
        ('["a"]', coded("table.no-object", "an array", ":2")),
        ('"a"', coded("table.no-object", "a string", ":2")),
        ('{"text": "trunca', coded("table.json", "column 10", ":2")),
        ('{"text": "a"} {"text": "b"}', coded("table.json", "column 15", "Extra data", ":2")),
        ('{"text": "a", "text": "b"}', coded("table.json-fault", ":2", "'text'")),
        ('{"text": "\\ud800"}', coded("table.surrogate", "d800", ":2", "'text'")),
        (
            '{"text": ' + "[" * 5000 + "]" * 5000 + "}",
            coded("table.json-fault", "deeply", ":2"),
        ),
        ('{"n": ' + "1" * 5000 + "}", coded("table.json-fault", ":2")),
    ],
)
def test_jsonl_refuses_a_bad_line_by_its_number(file, line, message):
    path = file("a.jsonl", '{"text": "good"}\n' + line + "\n")
    with raises(DataError, message) as caught:
        read(path, "text")
    assert str(caught.value).startswith(str(path))


def test_jsonl_invalid_utf8_names_the_line(file):
    path = file("a.jsonl", b'{"text": "good"}\n{"text": "\xe9"}\n')
    with raises(DataError, "text.utf8", "a.jsonl:2", "0xe9", "column 11", "offset 27"):
        read(path)


def test_jsonl_line_beyond_the_limit_is_refused_before_the_rest_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as handle:
        handle.write(b'{"text": "' + b"x" * 100)
        handle.truncate(2**40)
    with raises(DataError, "text.too-long", 2**40):
        read(path, limit_bytes=64)


def test_jsonl_is_a_stream(file):
    """Documents in front of a bad line arrive before the error."""
    found = documents(file("a.jsonl", '{"text": "one"}\nbad\n'))
    assert next(found).text == "one"
    with pytest.raises(DataError):
        next(found)


@pytest.mark.parametrize(
    ("row", "chosen"),
    [({"n": 1, "body": "yes"}, "yes"), ({"text": "yes", "url": "no"}, "yes")],
    ids=["only column of strings", "called text"],
)
def test_the_obvious_column_is_taken(file, row, chosen):
    assert read(file("a.jsonl", json.dumps(row))) == [chosen]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"title": "a", "body": "b"}, coded("table.which-column", "'title', 'body'")),
        ({"title": "a", "body": None}, coded("table.which-column", "'title', 'body'")),
        ({"text": 5, "title": "a"}, coded("table.cell", "'text'", "a number (5)")),
        ({"text": None, "title": "a"}, coded("table.cell", "'text'", "null")),
        ({"n": 5}, coded("table.no-text-column", "'n'")),
        ({}, coded("table.no-text-column", "none")),
    ],
)
def test_no_column_is_guessed(file, row, message):
    with raises(DataError, message):
        read(file("a.jsonl", json.dumps(row)))


def test_a_json_file_is_a_list_of_rows_or_a_row_a_line(file):
    rows = [{"text": "one"}, {"text": "two"}]
    for content in (json.dumps(rows), json.dumps(rows, indent=1), "\n".join(map(json.dumps, rows))):
        path = file("a.json", content)
        assert read(path) == ["one", "two"]
        assert columns_in(path) == ["text"] and len(understood(path)) == 1


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("[]", "squad.empty"),
        ("[3]", "squad.no-object"),
        ('{"text": "one"}', "squad.no-key"),
        ('{"text": "one"}\n{"text"', "table.json"),
        ('{"text"', "file.json"),
        ("", "file.json"),
    ],
)
def test_a_json_file_of_another_form_is_refused(file, content, code):
    path = file("a.json", content)
    with raises(DataError, code):
        read(path)


def test_a_first_row_that_is_longer_than_what_is_looked_at(file):
    path = file("a.json", json.dumps([{"text": "x" * 2**20, "n": 1}]))
    assert columns_in(path) == ["text", "n"]


@pytest.mark.parametrize("mark", ";\t|")
def test_a_csv_file_has_the_delimiter_of_its_first_line(file, mark):
    """A comma in numbers or in quotation marks is none."""
    path = file("a.csv", f'"title, or not"{mark}text{mark}n\n1,5{mark}"a{mark}b, c"{mark}2\n')
    [row] = records(path, ["title, or not", "text", "n"])
    assert list(row.values.values()) == ["1,5", f"a{mark}b, c", "2"]
    assert repr(mark) in understood(path)[0] and columns_in(path)[1:] == ["text", "n"]
    bare = file("b.csv", f"1,5{mark}x\n")
    [row] = records(bare, ["a", "b"], header=["a", "b"])
    # By as many names as fields: a comma gives two as well.
    assert list(row.values.values()) == ["1", f"5{mark}x"]
    [row] = records(file("c.csv", f"1,5{mark}x{mark}y\n"), ["b"], header=["a", "b", "c"])
    assert row.values == {"b": "x"}


@pytest.mark.parametrize("content", ["text\na;b\n", "title,text;\n1,a;b\n"])
def test_a_comma_stays_the_delimiter(file, content):
    path = file("a.csv", content)
    assert understood(path) == []
    assert len(read(path, column=columns_in(path)[-1])) == 1


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet"])
def test_an_optional_column_is_none_where_it_is_absent(file, parquet, suffix):
    files = {
        "csv": lambda: file("a.csv", "a,b\n1,2\n"),
        "jsonl": lambda: file("a.jsonl", '{"a": "1", "b": "2"}\n{"a": "1", "c": "3"}\n'),
        "json": lambda: file("a.json", '[{"a": "1", "b": "2"}, {"a": "1", "c": "3"}]'),
        "parquet": lambda: parquet(a=["1"], b=["2"]),
    }
    found = [row.values for row in records(files[suffix](), ["a"], optional=("b", "c"))]
    assert found[0] == {"a": "1", "b": "2", "c": None}
    assert found[1:] in ([], [{"a": "1", "b": None, "c": "3"}])


# CSV and TSV


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5))
def test_csv_returns_the_strings_it_was_given(tmp_path_factory, rows):
    """Property: commas, quotation marks, line breaks and all."""
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as handle:
        csv.writer(handle).writerows([("title", "body"), *rows])
    assert read(path, "body") == [body for _, body in rows]


def test_csv_origin_is_the_line_where_the_row_begins(file):
    path = file("a.csv", 'text\n"one\ntwo"\n\nthree\n')
    assert [(d.text, d.origin) for d in documents(path)] == [
        ("one\ntwo", f"{path}:2"),
        ("three", f"{path}:5"),
    ]


def test_tsv_has_no_quoting(file):
    assert read(file("a.tsv", 'label\ttext\n1\t"Open, he said\n')) == ['"Open, he said']


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("title,text\na,b\nc\n", coded("table.fields", "1 fields", "has 2", ":3")),
        ("title,text\na,b,c\n", coded("table.fields", "3 fields", "has 2", ":2")),
        ('text\n"open\nto the end\n', coded("table.csv", ":2")),
        ('text\n"a"b\n', coded("table.csv", ":2")),
        ("text,text\na,b\n", coded("table.repeated-name", "'text'", ":1")),
        ("title;text\na;b;c\n", coded("table.fields", "3 fields", "has 2", ":2")),
        ('title;text\na;"b"c\n', coded("table.csv", "';'", ":2")),
        ("title,body\na,b\n", coded("table.which-column", "'title', 'body'", ":1")),
        ("text\n", coded("source.holds-no-text", "no document", "a.csv")),
        ("", coded("source.holds-no-text", "no document", "a.csv")),
        (b"text\nok\n\xff\n", coded("text.utf8", ":3", "-8")),
    ],
)
def test_csv_refuses_what_is_malformed_by_its_line(file, content, message):
    with raises(DataError, message):
        read(file("a.csv", content))


def test_csv_missing_column_names_the_closest(file):
    with raises(DataError, "table.no-column", "'txet'", "Closest: 'text'.", "'title', 'text'"):
        read(file("a.csv", "title,text\na,b\n"), "txet")


def test_csv_long_field_is_read_up_to_the_limit_and_leaves_the_global_limit_alone(file):
    before = csv.field_size_limit()
    long = "x" * 200_000  # the csv module's own limit is 131,072
    path = file("a.csv", f"text\n{long}\n")
    found = documents(path)
    assert next(found).text == long
    assert csv.field_size_limit() == before
    many_lines = file("b.csv", 'text\n"' + "line\n" * 100 + '"\n')
    with raises(DataError, "text.too-long", "b.csv:2", "64"):
        read(many_lines, limit_bytes=64)
    assert csv.field_size_limit() == before


# Parquet


def test_parquet_returns_the_strings_it_was_given(parquet):
    texts = [f"text {number} ä" for number in range(600)]
    path = parquet(n=list(range(600)), body=texts)
    assert [(d.text, d.origin) for d in documents(path)] == [
        (t, f"{path}:{i}") for i, t in enumerate(texts, 1)
    ]


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
    ids=str,
)
def test_parquet_reads_every_type_of_string(parquet, kind):
    """Without being told which column: only one of them holds text."""
    assert read(parquet(n=[1, 2], body=pyarrow.array(["one", "two"]).cast(kind))) == ["one", "two"]


def test_parquet_with_two_columns_of_one_name_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    table = pyarrow.Table.from_arrays(
        [pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"]
    )
    pyarrow.parquet.write_table(table, path)
    with raises(DataError, "table.repeated-name", "'text'", "rows.parquet"):
        read(path)


@pytest.mark.parametrize(
    ("columns", "column", "message"),
    [
        ({"text": ["a", None]}, None, coded("table.cell", "'text'", "null", "rows.parquet:2")),
        ({"text": [1, 2]}, None, coded("table.cell", "'text'", "a number (1)", "rows.parquet:1")),
        ({"text": [["a"]]}, "text", coded("table.cell", "'text'", "an array", "rows.parquet:1")),
        ({"text": [b"a"]}, "text", coded("table.cell", "'text'", "bytes", "rows.parquet:1")),
        ({"n": [1], "body": [["a"]]}, None, coded("table.no-text-column", "'n', 'body'")),
        ({"title": ["a"], "body": ["b"]}, None, coded("table.which-column", "'title', 'body'")),
        ({"title": ["a"], "body": ["b"]}, "boby", coded("table.no-column", "'boby'", "'body'")),
        (
            {"text": pyarrow.array([], pyarrow.string())},
            None,
            coded("source.holds-no-text", "no document", "rows.parquet"),
        ),
    ],
)
def test_parquet_refuses_what_is_no_text(parquet, columns, column, message):
    with raises(DataError, message):
        read(parquet(**columns), column)


def test_parquet_invalid_utf8_names_the_row(parquet):
    # Arrow does not look into the bytes here.
    broken = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, pyarrow.array([b"good", b"\xff\xfe"]).buffers()
    )
    with raises(DataError, "table.utf8", "rows.parquet:2", "'text'", "byte 0", "-8 at"):
        read(parquet(text=broken))


def test_parquet_document_beyond_the_limit(parquet):
    with raises(DataError, "text.too-long", "rows.parquet:2", "4 bytes"):
        read(parquet(text=["abcd", "abcde"]), limit_bytes=4)


@pytest.mark.parametrize("keep", [0, 3, 40, -9])
def test_parquet_truncated(parquet, keep):
    path = parquet(text=["one"] * 100)
    path.write_bytes(path.read_bytes()[:keep])
    with raises(DataError, "table.parquet", "rows.parquet"):
        read(path)


def test_parquet_column_name_that_is_no_utf8(parquet):
    """Found by fuzzing: pyarrow decodes names late, and its UnicodeDecodeError is no ArrowException."""
    path = parquet(column_x=["one"])
    path.write_bytes(path.read_bytes().replace(b"column_x", b"column_\xff"))
    with raises(DataError, "table.parquet"):
        read(path)


def test_separator_does_not_go_with_a_table(file):
    with raises(ConfigError, "source.separator-of-table"):
        read(file("a.jsonl", '{"text": "a"}'), separator="x")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.txt"])
@given(raw=st.binary(max_size=200))
def test_any_bytes_give_documents_or_a_data_error(tmp_path_factory, name, raw):
    """Property (fuzz): no other exception reaches the user, whatever a file holds."""
    path = tmp_path_factory.mktemp("fuzz") / name
    path.write_bytes(raw)
    try:
        assert all(isinstance(text, str) for text in read(path))
    except DataError as error:
        assert name in str(error)


SEEDS = {
    "a.jsonl": b'{"text": "one", "n": 1}\n{"text": "two \xc3\xa4", "n": 2}\n',
    "a.csv": b'title,text\n1,"one, ""two"""\n2,"th\nree"\n',
}


@pytest.mark.parametrize("name", SEEDS)
@given(data=st.data())
def test_a_valid_file_with_changed_bytes_gives_documents_or_a_data_error(
    tmp_path_factory, name, data
):
    raw = bytearray(SEEDS[name])
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("mutants") / name
    path.write_bytes(raw)
    try:
        read(path, "text")
    except DataError as error:
        assert name in str(error)
