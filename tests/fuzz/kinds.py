"""The kinds of files that the product reads, each with a function that makes a small intact one and a reader.

`make(folder)` returns the path of an intact file, and `read(path)` reads all of it as the product does. A reader may
return or raise a `BookwheelError`; everything else is a defect.
"""

import bz2
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file
from tokenizers import BertWordPieceTokenizer

from flows.verbs.show import build_evaluation_reply, format_evaluation_line, summarize_evaluation
from rag_model.chat_template import TemplateRefusalError, _render_in_child
from rag_model.corpus.dump_formats.mediawiki import parse_pages
from rag_model.corpus.dump_formats.record_format import describe_slice, find_record_format
from rag_model.corpus.passages import PassageFile, PassageWriter
from rag_model.corpus.ragged_file import SparseFile, TokenFile, TokenVectors, TokenWriter, compute_offsets
from rag_model.corpus.records import Passage, Slice
from rag_model.corpus.salient_spans import SalientSpan, SpanFile, SpanWriter
from rag_model.corpus.source import read_slice
from rag_model.encoders.architecture import check_gguf_file
from rag_model.encoders.static_folder import StaticTable
from rag_model.encoders.tokens import load_tokenizer, tokenize
from rag_model.encoders.weights import digest_weights
from rag_model.endpoint import Endpoint
from rag_model.evaluation.questions import read_questions
from rag_model.evaluation.records import compare_evaluations
from rag_model.index.build import iter_slices, run_stages
from rag_model.index.files.intake import inspect_vectors, split_into_parts
from rag_model.index.files.pieces import open_piece_head, path_opener, write_sliced_piece
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.graphs.cells import unpack_slices
from rag_model.index.kind import IndexFiles, get_kind_for_factory
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.counting import count_texts, iter_texts
from rag_model.index.postings.derive import derive_index
from rag_model.index.postings.file import PostingsFile
from rag_model.index.postings.search import Bm25Index
from rag_model.index.recipe import IndexRecipe
from rag_model.index.search import open_index
from rag_model.index.tokens.search import TokenIndexFile
from rag_model.process import _answer_call, _parse_reply
from rag_model.reading.writers.chat_settings import ChatSettings
from rag_model.reading.writers.endpoint import EndpointWriter
from rag_model.reading.writers.writer import Prompt
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import parse_record
from rag_model.store.store import Store
from rag_model.store.versions.evaluation_manifest import (
    EvaluationContent,
    EvaluationManifest,
    EvaluationSubject,
    MetricValue,
)
from rag_model.store.versions.manifest import Content, Manifest, PartEntry
from rag_model.store.versions.mapped import write_mapped_copy
from rag_model.store.versions.model_manifest import ModelContent, ModelManifest
from tests.fixtures.impact_index import draw_passages, write_rows
from tests.fixtures.impact_index import draw_queries as impact_questions
from tests.fixtures.scripted_server import STREAM, make_event, make_token, send, serve_script
from tests.fixtures.tiny_generators import CHAT
from tests.fuzz.deltas import DELTAS

D, N, _TERMS, _SHARDS = 16, 400, 50, 3
_ID = "1" * 64


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of file."""

    name: str
    make: Callable[[Path], Path]  # writes an intact file into an empty folder
    read: Callable[[Path], object]  # reads the whole file


def _write_file(folder: Path, name: str, data: Any) -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return path


@cache
def _draw_vectors() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((N, D)).astype(np.float32)


# records


def _make_manifest(folder: Path) -> Path:
    blob = BlobRef("sha256:" + "a" * 64, 5)
    files = {"passages/part-00000.parquet": blob, "index/hnsw.faiss": blob}
    entry = {"kind": "hnsw", "factory": "HNSW32", "metric": "ip", "n": 3, "d": 4, "search": {"efSearch": 128}}
    content = Content({"kind": "wiki"}, (PartEntry("part-00000", 1, 2, 3),), files, {"a": 1}, {}, {"hnsw": entry})
    return _write_file(folder, "manifest.json", Manifest(content, {"recall": 0.9}, (_ID,)).to_json())


def _make_model(folder: Path) -> Path:
    content = ModelContent("dpr", {"model.safetensors": BlobRef("sha256:" + "a" * 64, 5)}, {}, {"a": 1})
    return _write_file(folder, "model.json", ModelManifest(content).to_json())


def _make_evaluation(folder: Path) -> Path:
    subject = EvaluationSubject(_ID, "", "sha256:" + "a" * 64, {"k": 20, "retrievers": ["hnsw"]})
    files = {"values.json": BlobRef("sha256:" + "a" * 64, 5)}
    content = EvaluationContent(
        subject, {"hnsw": {"Success@20": MetricValue(0.5, 0.4, 0.6), "EM": MetricValue(0.25)}}, files
    )
    provenance = {"created_at": "2026", "questions": "dev.jsonl", "n": 3}
    return _write_file(folder, "evaluation.json", EvaluationManifest(content, provenance).to_json())


def _read_evaluation(path: Path) -> object:
    manifest = EvaluationManifest.from_bytes(path.read_bytes())
    return build_evaluation_reply(manifest, "").text, summarize_evaluation(manifest), format_evaluation_line(manifest)


def _make_values(folder: Path) -> Path:
    columns = {"Success@20": [1.0, 0.0, 1.0], "EM": [0.5, None, 1]}
    return _write_file(folder, "values.json", {"questions": ["a", "b", "c"], "retrievers": {"hnsw": columns}})


def _read_values(path: Path) -> object:
    store = Store.open(str(path.parent / "store"), create=True)
    subject, files = EvaluationSubject(_ID, "", "sha256:" + "a" * 64, {}), {"values.json": store.blobs.put_file(path)}
    figures = {"hnsw": {"Success@20": MetricValue(0.5), "EM": MetricValue(0.25)}}
    manifest = EvaluationManifest(EvaluationContent(subject, figures, files))
    return compare_evaluations(store, manifest, manifest)


def _read_manifest(path: Path) -> object:
    manifest = Manifest.from_bytes(path.read_bytes())
    return Manifest.from_bytes(json.dumps(manifest.to_json()).encode()).content.default_retriever


def _read_model(path: Path) -> object:
    return ModelManifest.from_bytes(path.read_bytes()).to_json()


def _make_ref_move(folder: Path) -> Path:
    move = {"format": 1, "number": 1, "snapshot": _ID, "created_at": "2026", "previous": None, "nonce": "", "note": "x"}
    return _write_file(folder, "move.json", move)


def _make_takedown(folder: Path) -> Path:
    texts = dict.fromkeys(("wiki", "reason", "by", "created_at", "nonce"), "x")
    return _write_file(folder, "takedown.json", {"format": 1, "number": 1, "pages": ["624", "7"], **texts})


def _make_replacement(folder: Path) -> Path:
    return _write_file(folder, "place.json", {"format": 1, "snapshot": _ID, "by": "2" * 64, "nonce": ""})


def _make_intent(folder: Path) -> Path:
    return _write_file(folder, "intent.json", {"format": 1, "started": 1.0, "needs": ["blobs/aa/b"]})


def _read_in_store(store_path: str, read: Callable[[Store], object], path: Path) -> object:
    root = path.parent / "store"
    if not root.exists():
        Store.open(str(root), create=True)
    store = Store.open(str(root))
    store.files.write(store_path, path.read_bytes())
    return read(store)


def _make_memo(folder: Path) -> Path:
    value = {"format": 1, "stage": "s", "key": _ID, "outputs": {"a": {"id": "sha256:" + _ID, "size": 1}}, "facts": {}}
    return _write_file(folder, "memo.json", {**value, "inputs": None, "by": None, "nonce": ""})


# rows


def _make_passages(folder: Path) -> Path:
    with PassageWriter(folder / "part.parquet") as writer:
        for number in range(60):
            text = f"passage {number} is of pigs and {'very ' * (number % 5)}wise"
            digest = Passage.hash_of("Pigs", text)
            writer.write(Passage(f"{number}", "1", 7, "Pigs", "", text, 0, len(text.split()), digest, number or None))
    return folder / "part.parquet"


def _read_passages(path: Path) -> object:
    with PassageFile(path) as file:
        rows = file.read_rows([0, file.n_rows - 1]) if file.n_rows else []
        write_mapped_copy(path, path.with_suffix(".mapped"))
        return rows, sum(1 for _ in file.iter_passages())


def _make_slices(folder: Path) -> Path:
    slices = []
    for rows in np.array_split(_draw_vectors(), _SHARDS):
        digests = np.arange(len(rows), dtype=np.uint64)
        slices.append(np.array([len(rows) - 9, 9, 4]).tobytes() + rows.tobytes() + digests.tobytes())
    write_sliced_piece(folder / "piece", "stamp", [np.arange(9), np.arange(N)], slices, [1] * _SHARDS)
    return folder / "piece"


def _read_slices(path: Path) -> object:
    cells = [unpack_slices(iter_slices([path], _SHARDS, number), D) for number in range(_SHARDS)]
    read = [(rows.vectors, rows.digests) for cell in cells for rows in cell]
    with open_piece_head(path_opener(path), _SHARDS, "stamp", 2, str(path)) as piece:
        return read, piece.read(0), piece.read(1)


def _make_spans(folder: Path) -> Path:
    writer = SpanWriter()
    for row in range(N):
        writer.write([SalientSpan(0, 4, 0), SalientSpan(row, row + 5, 1)])
    writer.save(folder / "spans.npy")
    return folder / "spans.npy"


def _make_vectors(folder: Path) -> Path:
    np.save(folder / "part.npy", _draw_vectors())
    return folder / "part.npy"


def _read_vectors(path: Path) -> object:
    return VectorFiles([path]).read_all()


def _read_input(path: Path) -> object:
    part_sizes: list[int] = []
    return split_into_parts(inspect_vectors([path]), lambda part: part_sizes.append(len(part)), "drop")


def _make_vector_parquet(folder: Path) -> Path:
    pq.write_table(pa.table({"vector": [row.tolist() for row in _draw_vectors()[:50]]}), folder / "vectors.parquet")
    return folder / "vectors.parquet"


def _make_tokens(folder: Path) -> Path:
    lengths = np.array([5, 0, 7, 3] * 8)
    vectors = np.random.default_rng(1).standard_normal((int(lengths.sum()), D)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    with TokenWriter(folder / "part.arrow", D, "float16") as writer:
        writer.write(TokenVectors(vectors, compute_offsets(lengths)))
    return folder / "part.arrow"


def _read_tokens(path: Path) -> object:
    file = TokenFile(path)
    return sum(len(block) for block in file.iter_batches())


def _make_sparse(folder: Path) -> Path:
    (path,) = write_rows(draw_passages(60, _TERMS, 20), [], folder, _TERMS)
    return path


def _read_sparse(path: Path) -> object:
    return sum(len(block) for block in SparseFile(path).iter_batches())


# indexes


def _build_index(factory: str, folder: Path) -> Path:
    kind = get_kind_for_factory(factory)
    rows = {"text": _make_passages, "tokens": _make_tokens, "vectors": _make_vectors, "sparse": _make_sparse}[
        kind.represents
    ](folder)
    n = {"text": 60, "tokens": 32, "vectors": N, "sparse": 60}[kind.represents]
    plan = kind.plan(IndexRecipe(factory), n, {"text": 0, "sparse": _TERMS}.get(kind.represents, D))
    run_stages(plan, [rows], folder / "index", folder)
    return folder / "index"


def _read_faiss(path: Path) -> object:
    for mmap in (True, False):
        index = open_index(path, mmap=mmap)
        queries = np.random.default_rng(2).standard_normal((3, index.dim)).astype(np.float32)
        for k in (1, min(5, index.n)):
            index.search(queries, k)
    return index.defaults


def _read_postings(path: Path) -> object:
    index = Bm25Index(PostingsFile(path), Analyzer("english"), {})
    queries, k = ["pigs", "wise pigs very 7", "nothing"], min(5, index.n)
    return index.search(queries, k), index.search(queries, k, skip=False), index.find_missing_terms("very wise")


def _derive_postings(path: Path) -> object:
    """Derive an index with an insertion, two deletions and a change, and search it."""
    base_rows, out = np.array([*range(3), -1, *range(4, 30), -1, *range(31, 59)]), path.with_name("derived")
    new_texts = pa.RecordBatch.from_pydict({"title": ["Pigs", ""], "text": ["very wise pigs 7 8", "two of them"]})
    postings = count_texts(iter_texts([new_texts]), Analyzer("english"))
    derive_index(path, base_rows, lambda _: postings, out, 10)
    return _read_postings(out)


def _read_impacts(path: Path) -> object:
    index = get_kind_for_factory("Impact").open(IndexFiles(path, list, 60), {"factory": "Impact", "search": {}})
    return index.search(impact_questions(3, _TERMS, 5), min(5, index.n))


def _read_token_index(path: Path) -> object:
    index = TokenIndexFile.open(path)
    question = np.random.default_rng(2).standard_normal((2, 4, index.dim)).astype(np.float32)
    return index.search(question, min(3, index.n)), index.score(question[0], np.arange(index.n))


# models


def _make_weights(folder: Path) -> Path:
    arrays = {f"encoder.layer.{i}.weight": _draw_vectors()[:8] * i for i in range(3)}
    save_file(arrays, str(folder / "model.safetensors"))
    return folder / "model.safetensors"


def _make_static(folder: Path) -> Path:
    tensors = {
        "embeddings": _draw_vectors()[:20],
        "mapping": np.arange(30) % 20,
        "weights": _draw_vectors()[:30, 0].copy(),
    }
    save_file(tensors, str(folder / "model.safetensors"))
    return folder / "model.safetensors"


def _read_static(path: Path) -> object:
    table = StaticTable.open(path.parent)
    return table.digest(), table.read_vectors().tobytes()


def _make_tokenizer(folder: Path) -> Path:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    numbered = {token: number for number, token in enumerate(vocabulary)}
    BertWordPieceTokenizer(numbered, lowercase=True).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def _make_gguf(folder: Path) -> Path:
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    for name in ("block_count", "head_count", "context_length", "vocab_size"):
        getattr(writer, f"add_{name}")(1)
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_types([1, 1, 1])
    writer.add_tensor("token_embd.weight", _draw_vectors()[:3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "tiny.gguf"


def _make_tokenizer_rules(folder: Path) -> Path:
    path = _make_tokenizer(folder)
    rules = json.loads(path.read_bytes())
    steps = [
        {"type": "Prepend", "prepend": " "},
        {"type": "Replace", "pattern": {"String": "#"}, "content": "##"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        {"type": "Lowercase"},
    ]
    rules["normalizer"] = {"type": "Sequence", "normalizers": steps}
    rules["decoder"] = {"type": "Sequence", "decoders": [*steps[1:3], {"type": "Fuse"}]}
    return _write_file(folder, path.name, rules)


def _read_tokenizer(path: Path) -> object:
    return tokenize(load_tokenizer(path.parent, 64), ["Who wrote it? Ein König.", "a" * 200, ""])


# corpora


def _make_dump(folder: Path) -> Path:
    revision = (
        "<revision><id>{0}</id><timestamp>2026-11-01T12:00:00Z</timestamp><text>'''T''' is [[a]].</text></revision>"
    )
    page = "<page><title>T{0}</title><ns>0</ns><id>{0}</id>" + revision + "</page>"
    head = '<mediawiki xml:lang="en"><siteinfo><dbname>enwiki</dbname><base>https://x/y</base></siteinfo>'
    return _write_file(folder, "dump.xml", (head + "".join(map(page.format, range(1, 30))) + "</mediawiki>").encode())


def _make_packed_dump(folder: Path) -> Path:
    return _write_file(folder, "dump.xml.bz2", bz2.compress(_make_dump(folder).read_bytes()))


def _read_dump(path: Path) -> object:
    piece = Slice(str(path), 0, path.stat().st_size, "bz2" if path.suffix == ".bz2" else "none", 1, 100)
    return sum(1 for _ in parse_pages(read_slice(piece), describe_slice(piece)))


def _make_jsonl(folder: Path) -> Path:
    rows = [
        {"id": i, "title": "t", "sections": [{"heading": "h", "text": "x"}], "revised": "2026-11-01"} for i in range(20)
    ]
    return _write_file(folder, "corpus.jsonl", "\n".join(map(json.dumps, rows)).encode())


def _make_tsv(folder: Path) -> Path:
    return _write_file(folder, "corpus.tsv", b"id\ttext\ttitle\n" + b'1\t"a ""b"" c"\tT\n' * 20)


def _make_documents(folder: Path) -> Path:
    dates = pa.array([1_793_534_400_000, None], pa.timestamp("ms", tz="UTC"))
    texts = {"id": ["1", "2"], "title": ["a", "b"], "text": ["x" * 99, "y"]}
    pq.write_table(pa.table({**texts, "revised": dates}), folder / "corpus.parquet")
    return folder / "corpus.parquet"


def _read_rows(path: Path) -> object:
    record_format = find_record_format(str(path))
    assert record_format is not None
    return sum(1 for _ in record_format.read_records(str(path)))


def _make_questions(folder: Path) -> Path:
    rows = [{"question": f"What is {i}?", "answers": ["x", "y"]} for i in range(9)]
    return _write_file(folder, "questions.jsonl", "\n".join(map(json.dumps, rows)).encode())


def _read_questions(path: Path) -> object:
    return read_questions(str(path))


# what models and their endpoints send


def _make_reply(folder: Path) -> Path:
    events = [
        make_event("<think>Who?</think>"),
        make_token("George", -0.5),
        make_event(" Orwell", reasoning="so"),
        make_event("", "stop"),
    ]
    usage = {"prompt_tokens": 40, "completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 2}}
    last = f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()
    return _write_file(folder, "reply.http", STREAM + b"".join(events) + last)


def _make_whole_reply(folder: Path) -> Path:
    call = {"type": "function", "function": {"name": "search", "arguments": "{}"}}
    message = {"role": "assistant", "content": [{"type": "text", "text": "Orwell"}], "tool_calls": [call]}
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": None}).encode()
    head = STREAM.replace(b"text/event-stream", b"application/json\r\nContent-Encoding: gzip")
    return _write_file(folder, "reply.http", head + gzip.compress(body, mtime=0))


def _read_reply(path: Path) -> object:
    """Send the bytes as the reply of an endpoint, including the HTTP head."""
    settings = ChatSettings(tries=1, whole_seconds=3.0, first_seconds=2.0, logprobs=True)
    with serve_script(send(head=path.read_bytes())) as server:
        writer = EndpointWriter("model", settings, Endpoint(server.url, "a-key-of-sixteen-characters"))
        try:
            return writer.write([Prompt("Answer in few words.", "who wrote animal farm?")])
        finally:
            writer.close()


def _make_chat_template(folder: Path) -> Path:
    return _write_file(folder, "chat_template.jinja", CHAT.encode())


def _render_template(path: Path) -> object:
    """Render the template in this process, which has limits like the product's child process."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "who?"}]
    arguments = [path.read_bytes().decode("utf-8", "replace"), messages, {"bos_token": "<s>"}]
    reply = _parse_reply(_answer_call(_render_in_child, arguments).encode(), 0)
    if reply["refusal"]:
        raise TemplateRefusalError(reply["refusal"])
    return reply


_FAISS = {
    "flat": "Flat",
    "hnsw": "HNSW8",
    "hnsw-sq8": "HNSW8_SQ8",
    "ivf": "IVF8,Flat",
    "ivf-sq8": "IVF8,SQ8",
    "ivf-pq": "IVF8_HNSW8,PQ4x4np",
    "ivf-rabitq": "IVF8,RaBitQ4",
    "opq": "OPQ4,IVF8,PQ4x4np",
    "refine": "PCA8,IVF8,PQ4x4np,Refine(SQfp16)",
}

KINDS = [
    Kind("manifest", _make_manifest, _read_manifest),
    Kind("model manifest", _make_model, _read_model),
    Kind("evaluation manifest", _make_evaluation, _read_evaluation),
    Kind("evaluation values", _make_values, _read_values),
    Kind(
        "ref",
        _make_ref_move,
        partial(_read_in_store, "refs/latest/00000001.json", lambda store: store.refs.read_history("latest")),
    ),
    Kind(
        "takedown",
        _make_takedown,
        partial(_read_in_store, "takedowns/00000001.json", lambda store: store.takedowns.list_records()),
    ),
    Kind(
        "replacement",
        _make_replacement,
        partial(_read_in_store, f"takedowns/{_ID}.json", lambda store: store.takedowns.find_replacement(_ID)),
    ),
    Kind(
        "intent",
        _make_intent,
        partial(_read_in_store, "intents/build.json", lambda store: store.intents.list_live_intents(0.0)),
    ),
    Kind("memo", _make_memo, lambda path: parse_record("s", _ID, path.read_bytes())),
    Kind("passages", _make_passages, _read_passages),
    *(Kind(*delta) for delta in DELTAS),
    Kind("spans", _make_spans, lambda path: [SpanFile(path).get_range(0, N), SpanFile(path).rows]),
    Kind("vectors", _make_vectors, _read_vectors),
    Kind("vector input npy", _make_vectors, _read_input),
    Kind("vector input parquet", _make_vector_parquet, _read_input),
    Kind("token vectors", _make_tokens, _read_tokens),
    *(Kind(f"faiss {name}", partial(_build_index, factory), _read_faiss) for name, factory in _FAISS.items()),
    Kind("slices", _make_slices, _read_slices),
    Kind("postings", partial(_build_index, "BM25"), _read_postings),
    Kind("postings of a later snapshot", partial(_build_index, "BM25"), _derive_postings),
    Kind("sparse rows", _make_sparse, _read_sparse),
    Kind("impacts", partial(_build_index, "Impact"), _read_impacts),
    Kind("token index", partial(_build_index, "MaxSim,PQ4"), _read_token_index),
    Kind("weights", _make_weights, lambda path: digest_weights(path.parent)),
    Kind("tokenizer", _make_tokenizer, _read_tokenizer),
    Kind("rules of a tokenizer", _make_tokenizer_rules, _read_tokenizer),
    Kind("gguf header", _make_gguf, check_gguf_file),
    Kind("static encoder", _make_static, _read_static),
    Kind("dump", _make_dump, _read_dump),
    Kind("packed dump", _make_packed_dump, _read_dump),
    Kind("jsonl corpus", _make_jsonl, _read_rows),
    Kind("tsv corpus", _make_tsv, _read_rows),
    Kind("parquet corpus", _make_documents, _read_rows),
    Kind("questions", _make_questions, _read_questions),
    Kind("reply of an endpoint", _make_reply, _read_reply),
    Kind("whole reply of an endpoint", _make_whole_reply, _read_reply),
    Kind("chat template", _make_chat_template, _render_template),
]
