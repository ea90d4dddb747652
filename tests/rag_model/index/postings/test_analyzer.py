import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import StoreError, UsageError
from rag_model.index.postings.analyzer import MAX_CHARACTERS, Analyzer
from rag_model.index.postings.lucene_analyzer import LuceneAnalyzer, choose_analyzer, load_analyzer


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
def test_terms_are_short_utf8_and_reproducible(text: str) -> None:
    analyzer = Analyzer()
    text_terms = analyzer.terms(text)
    assert text_terms == Analyzer().terms(text) == analyzer.terms(text)
    assert all(0 < len(term.decode()) <= 18 * MAX_CHARACTERS for term in text_terms)


@pytest.mark.parametrize(
    ("language", "word"), [("porter", "s"), ("arabic", "\u0640"), ("yiddish", "\u05b0"), ("nepali", "\u091b")]
)
def test_word_that_stems_to_nothing_is_kept(language: str, word: str) -> None:
    assert terms(word, language) == [word]
    analyzer = Analyzer(language)
    assert analyzer.analyze_tokens([b"first", word.encode()]) == (analyzer.terms(f"first {word}"), [1, 1])


def test_a_word_of_two_megabytes_is_one_short_term() -> None:
    (term,) = Analyzer("none").terms("a" * (2 << 20))
    assert term == b"a" * MAX_CHARACTERS


@pytest.mark.parametrize(
    ("accented", "plain"),
    [
        ("Łódź", "Lodz"),
        ("Rudkøbing", "rudkobing"),
        ("Đà Nẵng", "da nang"),
        ("Ærø", "aero"),
        ("Straße", "strasse"),
        ("Þórður Æsir", "thordur aesir"),
        ("Ħal Għaxaq", "hal ghaxaq"),
        ("ISPARTA", "ısparta"),
        ("Nikola Šubić Zrinjski", "nikola subic zrinjski"),
        ("\u0130stanbul", "istanbul"),
        ("œuvre", "oeuvre"),
        ("Donau\u00addampf\u00adschiff", "donaudampfschiff"),
        ("zero\u2060width\ufeff", "zerowidth"),
        ("السَّلَامُ عَلَيْكُم", "السلام عليكم"),
        ("محـــمد", "محمد"),
        ("שָׁלוֹם", "שלום"),
        ("ܫܠܳܡܳܐ", "ܫܠܡܐ"),
        ("ശ്രീ\u200c", "ശ്രീ"),
        ("می\u200cخواهم", "می خواهم"),
    ],
)
@pytest.mark.parametrize("language", ["english", "none", "arabic"])
def test_words_are_found_without_accents_and_vowel_marks(accented: str, plain: str, language: str) -> None:
    assert terms(accented, language) == terms(plain, language)


@pytest.mark.parametrize("words", [("سؤال", "سوال"), ("がっこう", "かっこう"), ("हिन्दी", "हन्द"), ("ยี่", "ย")])
def test_marks_that_distinguish_letters_are_kept(words: tuple[str, str]) -> None:
    assert terms(words[0]) != terms(words[1])


def test_latin_letters_become_those_of_lucene() -> None:
    """The table lists letters without a decomposition, as Lucene's ASCIIFoldingFilter maps them."""
    table = {
        **dict.fromkeys("ƀƃɓ", "b"),
        **dict.fromkeys("ƈȼɕ", "c"),
        **dict.fromkeys("ðđƌȡɖɗ", "d"),
        **dict.fromkeys("ǥɠ", "g"),
        **dict.fromkeys("ħɦ", "h"),
        **dict.fromkeys("ıɨ", "i"),
        **dict.fromkeys("ƙ", "k"),
        **dict.fromkeys("łƚȴɫɬɭ", "l"),
        **dict.fromkeys("ŋƞȵɲɳ", "n"),
        **dict.fromkeys("øǿ", "o"),
        **dict.fromkeys("ŧƫƭȶʈ", "t"),
        **dict.fromkeys("ƶȥɀʐʑ", "z"),
        **{"æ": "ae", "ǽ": "ae", "œ": "oe", "þ": "th", "ß": "ss"},
    }
    assert {letter: "".join(terms(letter, "none")) for letter in table} == table


def test_an_index_of_an_older_version_is_searched_with_its_rules() -> None:
    """The fingerprints of version 1, as snapshots have them."""
    fingerprints = {
        "english": "sha256:4e57cd5bcf77b189db34652555a000c68e34d2cb546a6f8891d51c5fd2edac39",
        "german": "sha256:c6a887f0be5c9fd284248ebb5a220da69198506bbae87830744d362743f397fb",
    }
    for language, fingerprint in fingerprints.items():
        analyzer = load_analyzer({"language": language, "analyzer": fingerprint})
        assert [term.decode() for term in analyzer.terms("Łódź do\u00adnau")] == ["łodz", "do", "nau"]
    newest = load_analyzer({"language": "english", "analyzer": Analyzer().fingerprint})
    assert newest.terms("Łódź do\u00adnau") == [b"lodz", b"donau"]
    with pytest.raises(StoreError, match="built by another analyzer of english words than PyStemmer"):
        load_analyzer({"language": "english", "analyzer": "sha256:0"})


def test_fingerprints_differ_only_by_language() -> None:
    assert Analyzer().fingerprint == Analyzer("english").fingerprint
    assert len({Analyzer(language).fingerprint for language in ("english", "german", "none")}) == 3


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(UsageError, match="no stemmer for 'klingon': choose none, or one of arabic"):
        Analyzer("klingon")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "The Runner's running, don't RUN! O'NEIL’S dogs' U.S.A. 1,000.5 3.14 foo_bar "
            "e-mail a:b www.example.com/x?y=1 c++",
            "runner run don't run o'neil dog u.s.a 1,000.5 3.14 foo_bar e mail a:b www.example.com x y 1 c",
        ),
        (
            "Beyoncé's Łódź İstanbul ΟΔΟΣ ﬁnal straße Ｔｏｋｙｏ ３.５ résumés naïveté",
            "beyoncé łódź istanbul οδοσ ﬁnal straße ｔｏｋｙｏ ３.５ résumé naïveté",
        ),
        (
            "東京タワー ひらがな ハンカチ 서울특별시 กรุงเทพมหานคร हिन्दी भाषा ភាសាខ្មែរ ABC東京",
            "東 京 タワー ひ ら が な ハンカチ 서울특별시 กรุงเทพมหานคร हिन्दी भाषा ភាសាខ្មែរ abc 東 京",
        ),
        (
            "רש\"י צ'רלס ג' العَرَبِيَّة می\u200cخواهم do\u00adnau",
            "רש\"י צ'רלס ג' العَرَبِيَّة می\u200cخواهم do\u00adnau",
        ),
        (
            "x² ½ © ♯ ☉ 👍🏽 👩\u200d👩\u200d👧 🇩🇪 7️⃣ #⃣ ok",
            "x © ♯ ☉ 👍🏽 👩\u200d👩\u200d👧 🇩🇪 7️⃣ #⃣ ok",
        ),
        (
            "possibly possiblies wobbliness nobly ably apology geology archaeologies doubly trekking "
            "revved meshhed cyying agreed hopping sky skies dying s is as ' _ __a_ _1",
            "possibl possibl wobbli nobli abli apolog geologi archaeolog doubli trek "
            "rev mesh cy agre hop sky ski dy s __a_ _1",
        ),
        ("ab" * 130 + "ing", "ab" * 127 + "a babab"),  # more than 255 characters
    ],
)
def test_lucene_terms_are_those_of_anserini(text: str, expected: str) -> None:
    """Terms printed by `DefaultEnglishAnalyzer` of Anserini 1.7.1 (Lucene 9.9)."""
    assert [term.decode() for term in LuceneAnalyzer().terms(text)] == expected.split(" ")


_SUFFIXES = (
    "ational tional enci anci izer bli abli alli entli eli ousli ization ation ator alism iveness fulness ousness "
    "aliti iviti biliti logi icate ative alize iciti ical ful ness al ance ence er ic able ible ant ement ment ent ion "
    "sion ou ism ate iti ous ive ize ed ing eed s es ies sses y ly bly logy kked vving ings"
)


def test_lucene_stems_are_porters() -> None:
    """NLTK has the variant of Porter's own implementation, which Lucene has too."""
    from nltk.stem.porter import PorterStemmer  # noqa: PLC0415 - takes half a second

    generator, oracle = random.Random(3), PorterStemmer(PorterStemmer.MARTIN_EXTENSIONS)
    words = {
        "".join(generator.choices("aeioybcdlstxkmzg", k=generator.randint(0, 5)))
        + "".join(generator.choices(_SUFFIXES.split(), k=generator.randint(0, 2)))
        for _ in range(20_000)
    }
    analyzer = LuceneAnalyzer()
    assert {word: analyzer.term(word).decode() for word in words} == {word: oracle.stem(word) for word in words}


@given(st.text(max_size=60))
def test_lucene_terms_are_short_utf8_and_reproducible(text: str) -> None:
    text_terms = LuceneAnalyzer().terms(text)
    assert text_terms == LuceneAnalyzer().terms(text)
    assert all(0 < len(term.decode()) <= 255 for term in text_terms)


def test_an_analyzer_is_chosen_by_name_or_fingerprint() -> None:
    lucene = choose_analyzer({"analyzer": "lucene"})
    assert isinstance(lucene, LuceneAnalyzer)
    recorded_settings = {"language": "english", "analyzer": lucene.fingerprint}
    assert isinstance(load_analyzer(recorded_settings), LuceneAnalyzer)
    assert isinstance(choose_analyzer(recorded_settings), LuceneAnalyzer)
    assert choose_analyzer({}).fingerprint == Analyzer().fingerprint != lucene.fingerprint
    with pytest.raises(UsageError, match="there is no analyzer 'whoosh': choose lucene"):
        choose_analyzer({"analyzer": "whoosh"})
    with pytest.raises(UsageError, match="the analyzer lucene is for english, not 'german'"):
        choose_analyzer({"analyzer": "lucene", "language": "german"})
