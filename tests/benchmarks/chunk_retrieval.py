"""Texts cut by chunkers, the chunks' vectors, and the chunks that a reader gets within a budget of tokens."""

import csv
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from langchain_text_splitters import RecursiveCharacterTextSplitter
from span_measures import Span
from tokenizers import Tokenizer

from rag_model.corpus.chunkers.chunker import ChunkFunction
from rag_model.corpus.records import Article, Section
from rag_model.encoders.encoder import Encoder

Vectors = npt.NDArray[np.float32]
HEADING = re.compile(r"^ ?=+ .* =+ ?$", re.MULTILINE)
_TITLE = re.compile(r"^ ?= [^=]+ = ?$", re.MULTILINE)
_SEPARATORS = ["\n\n", "\n", ".", "?", "!", " ", ""]  # of Chroma's report


@dataclass(frozen=True, slots=True)
class Text:
    """A document of a corpus, and its offset in the characters of all corpora."""

    id: str
    title: str
    at: int  # offset: characters before it
    text: str
    sections: tuple[Section, ...]  # of the same characters; a section includes the line of its heading

    def article(self) -> Article:
        """Return the text in the form that chunkers take."""
        return Article(self.id, 0, self.title, self.sections)


@dataclass(frozen=True, slots=True)
class SpanQuestion:
    """A question, and the spans that answer it, as offsets in the characters of all corpora."""

    text: str
    corpus: str
    gold_spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A span of a text, with the text itself."""

    start: int  # offset in the characters of all corpora
    title: str
    text: str

    @property
    def span(self) -> Span:
        """The first offset and the end offset."""
        return self.start, self.start + len(self.text)


Chunks = Callable[[Text], list[Chunk]]


def chroma(folder: Path, names: Sequence[str]) -> tuple[list[Text], list[SpanQuestion]]:
    """Return the texts of Chroma's corpora and their questions; each article of Wikipedia is one text."""
    texts: list[Text] = []
    starts: dict[str, int] = {}
    for name in names:
        corpus_text = (folder / f"{name}.md").read_text(encoding="utf-8")
        starts[name] = sum(len(text.text) for text in texts)
        cuts = sorted({0, *(title_match.start() for title_match in _TITLE.finditer(corpus_text)), len(corpus_text)})
        for number, (first, last) in enumerate(pairwise(cuts)):
            text = corpus_text[first:last]
            texts.append(Text(f"{name}-{number}", "", starts[name] + first, text, sections(text)))
    with (folder / "questions_df.csv").open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["corpus_id"] in starts]
    return texts, [_build_question(row, starts[row["corpus_id"]]) for row in rows]


def _build_question(row: dict[str, str], offset: int) -> SpanQuestion:
    spans = tuple(
        (offset + reference["start_index"], offset + reference["end_index"])
        for reference in json.loads(row["references"])
    )
    return SpanQuestion(row["question"], row["corpus_id"], spans)


def sections(text: str) -> tuple[Section, ...]:
    """Return a text's sections including the lines of headings, so that every chunker cuts the same characters."""
    cuts = sorted({0, *(heading_match.start() for heading_match in HEADING.finditer(text)), len(text)})
    parts = [text[first:last] for first, last in pairwise(cuts)]
    headings = [heading_match.group().strip(" =") if (heading_match := HEADING.match(part)) else "" for part in parts]
    return tuple(map(Section, headings, parts))


def by_chunker(load_chunker: Callable[[], ChunkFunction], *, overlaps: bool = False) -> Chunks:
    """Return a function that chunks by one of our chunkers, and locates the chunks by their non-space characters."""
    chunk_functions: list[ChunkFunction] = []  # loaded on first use, because it may load a model

    def chunk_text(text: Text) -> list[Chunk]:
        if not chunk_functions:
            chunk_functions.append(load_chunker())
        (chunk_function,) = chunk_functions
        positions = [position for position, character in enumerate(text.text) if not character.isspace()]
        dense, search_start, text_chunks = "".join(text.text.split()), 0, []
        for passage in chunk_function(text.article()):
            inside = "".join(passage.text.split())
            offset = dense.index(inside, search_start)
            search_start = offset + (1 if overlaps else len(inside))
            start, end = positions[offset], positions[offset + len(inside) - 1] + 1
            text_chunks.append(Chunk(text.at + start, text.title, text.text[start:end]))
        return text_chunks

    return chunk_text


def langchain(tokenizer: Tokenizer, tokens: int) -> Chunks:
    """Return a function that chunks by LangChain's recursive splitter, with sizes in tokens of the encoder."""
    splitter = RecursiveCharacterTextSplitter(
        chunk_size=tokens,
        chunk_overlap=0,
        length_function=lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
        separators=_SEPARATORS,
        keep_separator="end",
        add_start_index=True,
    )

    def chunk_text(text: Text) -> list[Chunk]:
        documents = splitter.create_documents([text.text])
        return [
            Chunk(text.at + document.metadata["start_index"], text.title, document.page_content)
            for document in documents
        ]

    return chunk_text


class Library:
    """The chunks of some texts by one chunker, with their vectors and tokens."""

    def __init__(self, chunks: Sequence[Chunk], encoder: Encoder, tokenizer: Tokenizer) -> None:
        """Encode all chunks."""
        self.chunks = chunks
        self.vectors: Vectors = encoder.encode_passages(
            [chunk.title for chunk in chunks], [chunk.text for chunk in chunks]
        )
        encodings = tokenizer.encode_batch([chunk.text for chunk in chunks], add_special_tokens=False)
        # The end of each token, in characters of the chunk.
        self.ends = [[end for _, end in encoding.offsets] for encoding in encodings]

    def read(self, question: npt.NDArray[np.float32], budget: int) -> list[Chunk]:
        """Return the best chunks of at most `budget` tokens together; the last is truncated to fit."""
        best_chunks: list[Chunk] = []
        tokens_left = budget
        for row in np.argsort(-(self.vectors @ question), kind="stable"):
            chunk, ends = self.chunks[row], self.ends[row]
            text = chunk.text if len(ends) <= tokens_left else chunk.text[: ends[tokens_left - 1]]
            best_chunks.append(Chunk(chunk.start, chunk.title, text))
            tokens_left -= len(ends)
            if tokens_left <= 0:
                break
        return best_chunks
