"""The recursive chunker gives the same passages as LangChain's splitter for the same boundaries."""

from hypothesis import given
from hypothesis import strategies as st
from langchain_text_splitters import RecursiveCharacterTextSplitter

from rag_model.corpus.chunkers.windows import Recursive
from rag_model.corpus.records import Article, Section

SENTENCES = st.lists(st.sampled_from(["one", "two", "three"]), max_size=8).map(
    lambda words: " ".join(["All", *words, "end."])
)
LINES = st.lists(SENTENCES, min_size=1, max_size=5).map(" ".join)
PARAGRAPHS = st.lists(LINES, min_size=1, max_size=4).map("\n".join)
TEXTS = st.lists(PARAGRAPHS, min_size=1, max_size=5).map("\n\n".join)
ARTICLES = st.lists(TEXTS, min_size=1, max_size=3)


def build_splitter(words: int) -> RecursiveCharacterTextSplitter:
    return RecursiveCharacterTextSplitter(
        chunk_size=words,
        chunk_overlap=0,
        length_function=lambda text: len(text.split()),
        separators=["\n{3}", "\n\n", "\n", r"(?<=\.) ", " "],
        is_separator_regex=True,
    )


@given(ARTICLES, st.integers(1, 40))
def test_passages_equal_those_of_langchain(texts: list[str], words: int) -> None:
    article = Article("12", 7, "Ada", tuple(Section(f"h{number}", text) for number, text in enumerate(texts)))
    expected = [" ".join(chunk.split()) for chunk in build_splitter(words).split_text("\n\n\n".join(texts))]
    assert [passage.text for passage in Recursive(words)(article)] == expected


def test_id_names_the_first_heading_of_a_passage() -> None:
    sections = (Section("", "One two."), Section("Life", "Three. Four five six. Seven."), Section("Life", "Eight."))
    passages = list(Recursive(4)(Article("12", 7, "Ada", sections)))
    assert [(p.id, p.section, p.text, p.start_word, p.n_words) for p in passages] == [
        ("12:0", "", "One two.", 0, 2),
        ("12:Life.0", "Life", "Three. Four five six.", 2, 4),
        ("12:Life.1", "Life", "Seven.", 6, 1),
        ("12:Life_2.0", "Life", "Eight.", 7, 1),
    ]
