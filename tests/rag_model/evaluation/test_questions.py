"""Question files of every kind are read, and malformed lines are named."""

import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import InputError
from rag_model.evaluation.questions import Question, read_questions


def write_file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_of_dpr_is_read(tmp_path: Path) -> None:
    text = "who sings it\t['Linda Davis']\r\n" + 'who was it\t"[""Steve \'Flash\' Gordon"", \'Zoë\']"\n'
    question_set = read_questions(write_file(tmp_path, "nq-test.qa.csv", text))
    assert question_set.questions == (
        Question("0", "who sings it", ("Linda Davis",)),
        Question("1", "who was it", ("Steve 'Flash' Gordon", "Zoë")),
    )
    assert not question_set.qrels


def test_jsonl_keeps_ids_and_numbers_the_rest(tmp_path: Path) -> None:
    text = '{"id": 7, "question": " Q? ", "answers": ["a", "b"]}\n\n{"question": "R?", "answer": ["c"]}\n'
    text += '{"text": "S"}'
    assert read_questions(write_file(tmp_path, "q.jsonl", text)).questions == (
        Question("7", "Q?", ("a", "b")),
        Question("2", "R?", ("c",)),
        Question("3", "S"),
    )


@pytest.mark.parametrize(
    ("text", "questions"),
    [
        ("What is it?\n\nWho?\n", ["What is it?", "Who?"]),
        ('{"question": "What is it?", "answers": []}\n', ["What is it?"]),
        ("What is it?\t['x']\n", ["What is it?"]),
        ("\ufeffWhat is it?\n", ["What is it?"]),
        ('\ufeff{"question": "What is it?"}\n', ["What is it?"]),
    ],
)
def test_a_stream_is_known_by_its_first_line(text: str, questions: list[str]) -> None:
    assert [question.text for question in read_questions(io.StringIO(text)).questions] == questions


def test_answers_may_be_patterns(tmp_path: Path) -> None:
    assert read_questions(write_file(tmp_path, "q.csv", "Q\t['\\d+ miles']\n")).questions[0].answers == (r"\d+ miles",)


def test_compressed_files_are_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"question": "Q", "answers": ["a"]}\n'))
    assert read_questions(path).questions == (Question("0", "Q", ("a",)),)


@pytest.mark.parametrize("name", ["q.jsonl.gz", "q.txt.gz", "q.tsv.gz", "unknown.gz"])
def test_too_many_blank_lines_are_refused(tmp_path: Path, name: str) -> None:
    """A small compressed file may unpack to any number of them."""
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"\n" * 70_000))
    with pytest.raises(InputError, match="has more than 65,536 blank lines: remove them"):
        read_questions(path)


def test_blank_lines_between_questions_are_skipped() -> None:
    lines = ("who?" + "\n" * 17) * 5_000
    assert len(read_questions(io.StringIO(lines)).questions) == 5_000


def test_beir_folder_keeps_the_judged_questions(tmp_path: Path) -> None:
    write_file(tmp_path, "queries.jsonl", '{"_id": "q1", "text": "One?"}\n{"_id": "q2", "text": "Two?"}\n')
    write_file(tmp_path, "qrels/test.tsv", "query-id\tcorpus-id\tscore\nq2\t10\t2\r\nq2\t12\t0\n\n")
    question_set = read_questions(tmp_path)
    assert question_set.questions == (Question("q2", "Two?", own_document="q2"),)
    assert question_set.qrels == {"q2": {"10": 2, "12": 0}}


@pytest.mark.parametrize(("grade", "own_document"), [(1, ""), (0, "q2")])
def test_document_of_the_question_is_dropped_unless_it_is_relevant(
    tmp_path: Path, grade: int, own_document: str
) -> None:
    write_file(tmp_path, "queries.jsonl", '{"_id": "q2", "text": "Two?"}\n')
    write_file(tmp_path, "qrels/test.tsv", f"q2\tq2\t{grade}\nq2\t12\t1\n")
    assert [question.own_document for question in read_questions(tmp_path).questions] == [own_document]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("q.csv", "Q\t['a']\nno tab here\n", "line 2"),
        ("q.csv", "Q\t['a'\n", "list of strings"),
        ("q.csv", "Q\t[1, 2]\n", "list of strings"),
        ("q.csv", "Q\t__import__('os').system('true')\n", "list of strings"),
        ("q.csv", "Q\t" + "[" * 30_000 + "\n", "list of strings"),
        ("q.csv", "Q\t" + "(" * 70_000 + "\n", "list of strings"),
        ("q.csv", "Q\t" + "x" * 200_000 + "\n", "line 1"),
        ("q.csv", "\t['a']\n", "line 1"),
        ("q.jsonl", '{"question": "Q"}\n{"question": \n', "line 2"),
        ("q.jsonl", "[1]\n", "one JSON object per line"),
        ("q.jsonl", '{"question": "Q", "answers": "a"}\n', "list of strings"),
        ("q.jsonl", '{"question": "  "}\n', "non-empty"),
        ("q.jsonl", "[" * 100_000 + "\n", "line 1"),
        (
            "q.jsonl",
            '{"id": 1, "question": "Q"}\n{"id": 1, "question": "R"}\n',
            "two questions with the id '1'",
        ),
        ("q.jsonl", '{"question": "Q \\ud800"}\n', "line 1: .* half of a character"),
        ("q.txt", "\n \n", "no question"),
        ("q.txt", "x" * (1 << 20), "longer than a million"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        read_questions(write_file(tmp_path, name, text))
    assert str(tmp_path) in str(error.value)


def test_missing_damaged_and_non_text_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")
    (tmp_path / "latin.txt").write_bytes("Où?".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin\.txt, line 1 is not UTF-8"):
        read_questions(tmp_path / "latin.txt")
    for errors in ("strict", "surrogateescape"):  # standard input has either, by the locale
        stream = io.TextIOWrapper(io.BytesIO(b"who?\nq \xff\n"), encoding="utf-8", errors=errors)
        with pytest.raises(InputError, match="line 2 is not UTF-8: convert it"):
            read_questions(stream)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"question": "Q"}\n' * 999)[:-20])
    with pytest.raises(InputError, match="cannot be read"):
        read_questions(tmp_path / "cut.jsonl.gz")


@pytest.mark.parametrize(
    ("qrels", "message"),
    [
        ("q1\t10\n", "line 1"),
        ("q1\t10\tgood\n", "line 1"),
        ("q9\t10\t1\n", "has no judgement for a question of"),
        (None, "cannot be read"),
    ],
)
def test_wrong_beir_folders_are_refused(tmp_path: Path, qrels: str | None, message: str) -> None:
    write_file(tmp_path, "queries.jsonl", '{"_id": "q1", "text": "One?"}\n')
    if qrels is not None:
        write_file(tmp_path, "qrels/test.tsv", qrels)
    with pytest.raises(InputError, match=message):
        read_questions(tmp_path)


@given(st.lists(st.tuples(st.text(min_size=1), st.lists(st.text().filter(str.strip))), min_size=1))
def test_written_jsonl_is_read_back(rows: list[tuple[str, list[str]]]) -> None:
    rows = [(text, answers) for text, answers in rows if text.strip()] or [("Q", [])]
    lines = "".join(json.dumps({"question": text, "answers": answers}) + "\n" for text, answers in rows)
    question_set = read_questions(io.StringIO(lines)).questions
    assert [(q.text, list(q.answers)) for q in question_set] == [(text.strip(), answers) for text, answers in rows]


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        question_set = read_questions(io.StringIO(text))
    except InputError:
        return
    assert all(question.text.strip() for question in question_set.questions)


def test_a_question_may_name_its_passages_and_its_source() -> None:
    lines = [
        {"question": "One?", "passages": ["12:0", 7, "12:0"], "source": "squad"},
        {"text": "Two?", "answers": ["a"]},
        {"input": "Three?", "output": [{"answer": "b"}], "passages": ["3-1"], "source": "kilt"},
    ]
    question_set = read_questions(io.StringIO("".join(json.dumps(line) + "\n" for line in lines))).questions
    assert [(q.passages, q.source) for q in question_set] == [(("12:0", "7"), "squad"), ((), ""), (("3-1",), "kilt")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"passages": "12:0"}, r'line 1: `passages` must be a list of passage ids such as \["12:0", "12:1"\]'),
        ({"passages": [1.5]}, "`passages` must be a list"),
        ({"passages": None}, "`passages` must be a list"),
        ({"source": 3}, "line 1: `source` must be a string"),
    ],
)
def test_passages_and_sources_of_a_wrong_type_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_questions(io.StringIO(json.dumps({"question": "One?", **fields}) + "\n"))


def test_an_empty_answer_is_refused() -> None:
    with pytest.raises(InputError, match="line 1: an answer is empty and would match every passage: remove it"):
        read_questions(io.StringIO('{"question": "autism?", "answers": [" "]}\n'))
