"""Texts cut by chunkers, their vectors, and the spans of characters that a reader reads of them within a budget."""

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
    """A document of a corpus, at its place in all the corpora's characters."""

    id: str
    title: str
    at: int  # characters before it
    text: str
    sections: tuple[Section, ...]  # of the same characters, a heading's own line included

    def article(self) -> Article:
        """Return it as chunkers want it."""
        return Article(self.id, 0, self.title, self.sections)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the spans of all the corpora's characters that answer it."""

    text: str
    corpus: str
    wanted: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A span of a text, with the text itself."""

    start: int  # of all the corpora's characters
    title: str
    text: str

    @property
    def span(self) -> Span:
        """Return its characters' places."""
        return self.start, self.start + len(self.text)


Chunks = Callable[[Text], list[Chunk]]


def chroma(folder: Path, names: Sequence[str]) -> tuple[list[Text], list[Asked]]:
    """Return the texts of Chroma's corpora and their questions; an article of Wikipedia is a text of its own."""
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
    return texts, [_asked(row, starts[row["corpus_id"]]) for row in rows]


def _asked(row: dict[str, str], at: int) -> Asked:
    spans = tuple(
        (at + reference["start_index"], at + reference["end_index"]) for reference in json.loads(row["references"])
    )
    return Asked(row["question"], row["corpus_id"], spans)


def sections(text: str) -> tuple[Section, ...]:
    """Return a text's sections, each with its heading's line, so that every chunker cuts the same characters."""
    cuts = sorted({0, *(heading_match.start() for heading_match in HEADING.finditer(text)), len(text)})
    parts = [text[first:last] for first, last in pairwise(cuts)]
    headings = [heading_match.group().strip(" =") if (heading_match := HEADING.match(part)) else "" for part in parts]
    return tuple(map(Section, headings, parts))


def by_chunker(opened: Callable[[], ChunkFunction], *, overlaps: bool = False) -> Chunks:
    """Return the chunks of a chunker of ours, found again in the text, whose lines end differently."""
    chunk_functions: list[ChunkFunction] = []  # opened when it is used: it may load a model

    def chunks(text: Text) -> list[Chunk]:
        if not chunk_functions:
            chunk_functions.append(opened())
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

    return chunks


def langchain(tokenizer: Tokenizer, tokens: int) -> Chunks:
    """Return the chunks of LangChain's recursive splitter, whose size is counted in the encoder's tokens."""
    splitter = RecursiveCharacterTextSplitter(
        chunk_size=tokens,
        chunk_overlap=0,
        length_function=lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
        separators=_SEPARATORS,
        keep_separator="end",
        add_start_index=True,
    )

    def chunks(text: Text) -> list[Chunk]:
        documents = splitter.create_documents([text.text])
        return [
            Chunk(text.at + document.metadata["start_index"], text.title, document.page_content)
            for document in documents
        ]

    return chunks


class Library:
    """The chunks of some texts by one chunker, with their vectors and tokens."""

    def __init__(self, chunks: Sequence[Chunk], encoder: Encoder, tokenizer: Tokenizer) -> None:
        """Encode all chunks."""
        self.chunks = chunks
        self.vectors: Vectors = encoder.encode_passages(
            [chunk.title for chunk in chunks], [chunk.text for chunk in chunks]
        )
        encoded = tokenizer.encode_batch([chunk.text for chunk in chunks], add_special_tokens=False)
        self.ends = [
            [end for _, end in encoding.offsets] for encoding in encoded
        ]  # of each token, characters of the chunk

    def read(self, question: npt.NDArray[np.float32], budget: int) -> list[Chunk]:
        """Return the best chunks of at most `budget` tokens together: the last is cut where it reaches it."""
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
