import gzip
import io
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_model.errors import InputError
from rag_model.training.data.examples import Example, build_passage, digest_examples, iter_json_values, read_examples

DPR: list[dict[str, Any]] = [
    {
        "dataset": "nq_train_psgs_w100",
        "question": "who wrote animal farm?",
        "answers": ["George Orwell", "Orwell"],
        "positive_ctxs": [
            {"title": "Animal Farm", "text": "By George Orwell.", "score": 1000, "title_score": 1, "passage_id": "11"},
            {"title": "Orwell", "text": "Wrote Animal Farm.", "passage_id": "12"},
        ],
        "negative_ctxs": [{"title": "Far", "text": "Nothing.", "passage_id": "90"}],
        "hard_negative_ctxs": [{"title": "Farm", "text": f"Animals {n}.", "passage_id": f"2{n}"} for n in range(31)],
    },
    {"question": "wo?  ", "answers": [], "positive_ctxs": [], "negative_ctxs": [], "hard_negative_ctxs": []},
]
KILT = {
    "id": 7,
    "input": "who wrote animal farm?",
    "output": [
        {"answer": "Orwell", "provenance": [{"wikipedia_id": "620", "title": "Animal Farm"}]},
        {"answer": "Orwell"},
        {"answer": "George Orwell", "provenance": [{"wikipedia_id": "620"}, {"wikipedia_id": "11891"}]},
        {"provenance": [{"wikipedia_id": "5"}]},
    ],
    "meta": {},
}
TRIPLE = {"question": "wer schrieb „Öde“? 👩‍🚀", "answers": ["作者"], "context": "作者は…"}


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_text(path: Path, text: str) -> Path:
    content = text.encode()
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(content))
    return path


@pytest.mark.parametrize("name", ["biencoder-nq.json", "nq.json.gz", "nq.json.xz", "nq.jsonl"])
def test_reads_dpr_training_files(tmp_path: Path, name: str) -> None:
    text = lines(*DPR) if name.endswith("jsonl") else json.dumps(DPR, indent=4)
    first, second = read_examples(write_text(tmp_path / name, text))
    assert (first.id, first.question, first.answers) == ("0", "who wrote animal farm?", ("George Orwell", "Orwell"))
    assert [(positive.id, positive.title, positive.text) for positive in first.positives] == [
        ("11", "Animal Farm", "By George Orwell."),
        ("12", "Orwell", "Wrote Animal Farm."),
    ]
    assert [negative.id for negative in first.negatives] == [f"2{n}" for n in range(30)]
    assert second == Example("1", "wo?")


def test_kilt_examples_have_pages_and_no_passages(tmp_path: Path) -> None:
    (example,) = read_examples(write_text(tmp_path / "nq-dev-kilt.jsonl", lines(KILT)))
    assert example == Example("7", "who wrote animal farm?", ("Orwell", "George Orwell"), pages=("620", "11891", "5"))


@pytest.mark.parametrize("name", ["triples.jsonl", "triples.jsonl.xz", "triples.jsonl.gz"])
def test_reads_triples(tmp_path: Path, name: str) -> None:
    first, second = read_examples(write_text(tmp_path / name, "\ufeff" + lines(TRIPLE, {**TRIPLE, "id": "x"})))
    assert first == Example("0", TRIPLE["question"], ("作者",), (build_passage("", "作者は…"),))
    assert second.id == "x"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nq.csv", "who?\t['him', 'her']\n"),
        ("nq.jsonl", lines({"question": "who?", "answers": ["him", "her"]})),
        ("nq.tsv.gz", "who?\t['him', 'her']\n"),
    ],
)
def test_question_files_have_no_passages(tmp_path: Path, name: str, text: str) -> None:
    assert read_examples(write_text(tmp_path / name, text)) == [Example("0", "who?", ("him", "her"))]


def write_beir(folder: Path, corpus: str, qrels: str = "q1\td2\t1\nq1\td3\t2\nq1\td1\t0\n") -> Path:
    (folder / "qrels").mkdir(parents=True)
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels)
    (folder / "queries.jsonl").write_text(lines({"_id": "q1", "text": "who?"}, {"_id": "q2", "text": "not judged"}))
    write_text(folder / "corpus.jsonl", corpus)
    return folder


def test_reads_beir_folders(tmp_path: Path) -> None:
    corpus = lines(*({"_id": f"d{n}", "title": f"T{n}", "text": f"text {n}"} for n in range(5)))
    (example,) = read_examples(write_beir(tmp_path / "nq", corpus))
    assert [(positive.id, positive.page_id, positive.title) for positive in example.positives] == [
        ("d3", "d3", "T3"),
        ("d2", "d2", "T2"),
    ]
    assert (example.pages, example.own_document) == (("d3", "d2"), None)
    corpus += lines({"_id": "q1", "text": "who?"})
    (counterpart,) = read_examples(write_beir(tmp_path / "arguana", corpus))
    assert counterpart.own_document == build_passage("", "who?", "q1")
    assert counterpart.positives == example.positives
    assert digest_examples([counterpart]) != digest_examples([example])
    with pytest.raises(InputError, match=r"corpus.jsonl lacks document 'd2', which train.tsv lists"):
        read_examples(write_beir(tmp_path / "short", lines({"_id": "d3", "text": ""})))
    with pytest.raises(InputError, match=r"corpus.jsonl, line 1 is not a document in BEIR's .*\(it has no 'text'\)"):
        read_examples(write_beir(tmp_path / "bare", lines({"_id": "d3"})))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lines(TRIPLE, TRIPLE) + '{"question": \n', r"line 3: not a JSON value"),
        (lines(TRIPLE) + "\n\n" + lines({"question": "q"}), r"line 4 does not match the first .*\(it has no"),
        (lines(TRIPLE, {**TRIPLE, "question": "  "}), r"line 2 .*its question is empty"),
        (lines(TRIPLE, {**TRIPLE, "answers": "x"}), r"line 2 .*its answers are 'x', not a list of strings"),
        (lines(TRIPLE, {**TRIPLE, "context": 3}), r"line 2 .*3 is not a string"),
        (lines(TRIPLE, {**TRIPLE, "context": "\ud83d"}), r"line 2: .* half of a character"),
        (lines(TRIPLE, [1]), r"line 2 does not match the first"),
        (lines({**TRIPLE, "id": 1}, {**TRIPLE, "id": 1}), r"two examples with the id '1'"),
        (json.dumps(DPR, indent=1)[:-3], r"line \d+: "),
        ("[" + json.dumps(DPR[0]) + "\n" + json.dumps(DPR[1]) + "]", r"line 2: expected a comma"),
        ("[" + json.dumps(DPR[0]) + ",\n {]", r"line 2: not a JSON value"),
        (lines(KILT, {**KILT, "output": None}), r"line 2 does not match the first"),
        ("[]", "the array is empty, or its first example has none of"),
        ('[{"question": 1}]', "fields: question, positive_ctxs; input, output; question, context; add"),
        ("", "contains no questions"),
    ],
)
def test_malformed_file_is_refused_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_examples(write_text(tmp_path / "train.jsonl", text))


@pytest.mark.parametrize("text", ["\n" * 70_000 + lines(TRIPLE), lines(TRIPLE) + "\n" * 70_000])
def test_too_many_blank_lines_are_refused(tmp_path: Path, text: str) -> None:
    path = write_text(tmp_path / "train.jsonl", text)
    with pytest.raises(InputError, match="has more than 65,536 blank lines"):
        read_examples(path)
    folder = write_beir(tmp_path / "beir", text)
    with pytest.raises(InputError, match=r"corpus.jsonl has more than 65,536 blank lines|not a document in BEIR's"):
        read_examples(folder)


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.xz").write_bytes(lzma.compress(lines(*[TRIPLE] * 999).encode())[:-40])
    (tmp_path / "no.jsonl.gz").write_bytes(b"not gzip")
    (tmp_path / "latin.json").write_bytes(b'[{"question": "\xe9"}]')
    for name in ("cut.jsonl.xz", "no.jsonl.gz", "latin.json", "missing.json"):
        with pytest.raises(InputError, match=rf"{name} cannot be read as training examples "):
            read_examples(tmp_path / name)


def test_digest_does_not_depend_on_the_file_format(tmp_path: Path) -> None:
    array = read_examples(write_text(tmp_path / "a.json", json.dumps(DPR)))
    rows = read_examples(write_text(tmp_path / "b.jsonl", lines(*DPR)))
    assert digest_examples(array) == digest_examples(rows) != digest_examples(rows[:1])


@settings(max_examples=25)
@given(st.lists(st.recursive(st.none() | st.integers() | st.text() | st.floats(allow_nan=False), st.lists), max_size=5))
def test_values_of_an_array_equal_those_of_json(values: list[Any]) -> None:
    for text in (json.dumps(values), json.dumps(values, indent=2), "\n [" + json.dumps(values)[1:]):
        assert [value for _, value in iter_json_values(io.StringIO(text), "x")] == values


def test_array_longer_than_a_chunk_is_read_with_its_line_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_model.training.data.examples._CHUNK_SIZE", 7)
    rows = [{"n": n, "text": "é" * n} for n in range(40)]
    text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"
    assert list(iter_json_values(io.StringIO(text), "x")) == [(f"x, line {row['n'] + 2}", row) for row in rows]
