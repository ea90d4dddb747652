import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import UsageError
from rag_model.index.postings.analyzer import MAX_CHARACTERS, Analyzer


def terms(text: str, language: str = "english") -> list[str]:
    return [term.decode() for term in Analyzer(language).terms(text)]


def test_words_are_stems_without_case_accents_and_possessives() -> None:
    assert terms("The Runner's running, don't RUN!") == ["the", "runner", "run", "don", "t", "run"]
    assert terms("Beyoncé Beyonce BEYONCE\u0301") == ["beyonc"] * 3
    assert terms("Ｔｏｋｙｏ ﬁnal straße 3.14 foo_bar") == ["tokyo", "final", "strass", "3", "14", "foo", "bar"]
    assert terms("die Häuser", "german") == ["die", "haus"]
    assert terms("running", "none") == ["running"]


def test_scripts_without_spaces_give_characters_and_pairs() -> None:
    assert terms("東京タワー!") == ["東", "京", "タ", "ワ", "ー", "東京", "京タ", "タワ", "ワー"]
    assert terms("iPhone東京") == ["iphon", "東", "京", "東京"]
    assert set(terms("กรุงเทพ")) >= {"กร", "รุ", "เท"}


@pytest.mark.parametrize(
    "title", ["Москва", "القاهرة", "हिन्दी", "ירושלים", "Αθήνα", "北京", "서울", "ኢትዮጵያ", "Đà Nẵng"]
)
def test_a_title_in_any_script_has_the_terms_of_its_question(title: str) -> None:
    assert terms(title)
    assert set(terms(title)) <= set(terms(f"What is {title.upper()}, please?"))


@given(st.text(max_size=60))
def test_every_text_has_terms_that_are_utf8_short_and_the_same_again(text: str) -> None:
    analyzer = Analyzer()
    found = analyzer.terms(text)
    assert found == Analyzer().terms(text) == analyzer.terms(text)
    assert all(0 < len(term.decode()) <= 18 * MAX_CHARACTERS for term in found)


@pytest.mark.parametrize(
    ("language", "word"), [("porter", "s"), ("arabic", "\u0640"), ("yiddish", "\u05b0"), ("nepali", "\u091b")]
)
def test_a_word_of_which_a_stemmer_leaves_nothing_stays_whole(language: str, word: str) -> None:
    assert terms(word, language) == [word]
    analyzer = Analyzer(language)
    assert analyzer.terms_of_tokens([b"first", word.encode()]) == (analyzer.terms(f"first {word}"), [1, 1])


def test_a_word_of_two_megabytes_is_one_short_term() -> None:
    (found,) = Analyzer("none").terms("a" * (2 << 20))
    assert found == b"a" * MAX_CHARACTERS


def test_fingerprints_differ_by_language_and_stay_otherwise() -> None:
    assert Analyzer().fingerprint == Analyzer("english").fingerprint
    assert len({Analyzer(one).fingerprint for one in ("english", "german", "none")}) == 3


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(UsageError, match="no stemmer for 'klingon': choose none, or one of arabic"):
        Analyzer("klingon")
