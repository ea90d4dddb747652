import bz2
from collections import Counter

import pytest

from rag_model.corpus.articles import LANGUAGE_WORDS, classify_page, get_language, get_namespace_aliases
from rag_model.corpus.dump_formats.mediawiki import parse_pages, read_siteinfo
from rag_model.corpus.records import Page, Siteinfo


def classify(title: str = "Anarchism", text: str = "Some words.", language: str = "en", **fields: object) -> object:
    values = {"namespace": 0, "redirect": False, "model": "wikitext", **fields}
    page = Page(page_id=1, rev_id=1, revised=None, title=title, text=text, **values)
    verdict = classify_page(page, Siteinfo("", language, ""))
    return "article" if verdict is page else verdict


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ({}, "article"),
        ({"namespace": 10}, "namespace"),
        ({"redirect": True}, "redirect"),
        ({"text": "#REDIRECT [[Anarchy]]"}, "redirect"),
        ({"text": "\n#redirect: [[Anarchy]]"}, "redirect"),
        ({"text": "On #redirect [[Anarchy]]"}, "article"),
        ({"model": "json"}, "not_wikitext"),
        ({"text": " \n"}, "empty"),
        ({"text": "'''A''' may be:\n* [[B]]\n{{disambiguation}}"}, "disambiguation"),
        ({"text": "x {{ Disambig | human name }}"}, "disambiguation"),
        ({"text": "x {{Place_name disambiguation}}"}, "disambiguation"),
        ({"text": "x {{hndis|Doe, John}}"}, "disambiguation"),
        ({"text": "x __DISAMBIG__"}, "disambiguation"),
        ({"text": "a [[B]]{{disambiguation needed|date=May 2020}}"}, "article"),
        ({"text": "{{other uses|A (disambiguation)}} text"}, "article"),
        ({"text": "{{disambiguations}} {{dabble}}"}, "article"),
        ({"title": "Mercury (disambiguation)"}, "disambiguation"),
        ({"title": "List of sovereign states"}, "list"),
        ({"title": "Index of Andorra-related articles"}, "list"),
        ({"title": "Outline of physics"}, "list"),
        ({"title": "Listed building"}, "article"),
        ({"title": "Franz List of Vienna"}, "article"),
        ({"namespace": 4, "redirect": True}, "namespace"),
    ],
)
def test_pages_that_dpr_excludes_are_dropped_with_a_reason(page, reason: str) -> None:
    assert classify(**page) == reason


@pytest.mark.parametrize(
    ("language", "page", "reason"),
    [
        ("de", {"text": "x {{Begriffsklärung}}"}, "disambiguation"),
        ("de", {"text": "{{Begriffsklärungshinweis}} x"}, "article"),
        ("de", {"title": "Liste der Päpste"}, "list"),
        ("de", {"text": "#WEITERLEITUNG [[X]]"}, "redirect"),
        ("fr", {"text": "x {{Homonymie}}"}, "disambiguation"),
        ("fr", {"title": "Liste d'îles"}, "list"),
        ("es", {"text": "x {{desambiguación}}"}, "disambiguation"),
        ("es", {"text": "#REDIRECCIÓN [[X]]"}, "redirect"),
        ("it", {"text": "{{disambigua}} x"}, "disambiguation"),
        ("pt-BR", {"title": "Lista de países"}, "list"),
        ("nl", {"text": "x {{dp}}"}, "disambiguation"),
        ("pl", {"text": "x {{Ujednoznacznienie}}"}, "disambiguation"),
        ("ru", {"text": "x {{неоднозначность|тип=топоним}}"}, "disambiguation"),
        ("ru", {"text": "{{значения|Москва}} x"}, "article"),
        ("ru", {"text": "#ПЕРЕНАПРАВЛЕНИЕ [[X]]"}, "redirect"),
        ("ja", {"text": "x {{aimai}}"}, "disambiguation"),
        ("ja", {"title": "国の一覧"}, "list"),
        ("ja", {"text": "#転送 [[X]]"}, "redirect"),
        ("zh", {"title": "水星 (消歧义)"}, "disambiguation"),
        ("zh", {"title": "国家列表"}, "list"),
        ("ar", {"text": "x {{توضيح}}"}, "disambiguation"),
        ("sv", {"text": "x {{förgrening}}"}, "disambiguation"),
        ("sv", {"title": "Lista över länder"}, "list"),
        ("eo", {"text": "x {{disambig}}"}, "disambiguation"),
        ("mr", {"text": "{{निःसंदिग्धीकरण}}\nच या नावाचे लेख:"}, "disambiguation"),
        ("el", {"text": "#ΑΝΑΚΑΤΕΥΘΥΝΣΗ [[X]]"}, "redirect"),
        ("ka", {"text": "x {{მრავალმნიშვნელოვანი}}"}, "disambiguation"),
        ("ltg", {"text": "x {{zeimeibu škiršona}}"}, "disambiguation"),
        ("tr", {"text": "#yönlendirme [[X]]"}, "redirect"),
        ("no", {"text": "#OMDIRIGERING [[X]]"}, "redirect"),
        ("zh-hant", {"text": "#重定向 [[X]]"}, "redirect"),
        ("sk", {"text": "x {{Rozlišovacia stránka}}"}, "disambiguation"),
        ("hi", {"title": "देशों की सूची"}, "list"),
        ("nb", {"title": "Liste over land"}, "list"),
        ("bar", {"title": "Liste der Flüsse"}, "list"),  # falls back to German
        ("bar", {"title": "Fluss (Begriffsklärung)"}, "disambiguation"),
        ("is", {"title": "Liste der Flüsse"}, "article"),
        ("en", {"text": "x {{Begriffsklärung}}"}, "article"),
    ],
)
def test_each_language_has_its_own_words(language: str, page, reason: str) -> None:
    assert classify(language=language, **page) == reason


@pytest.mark.parametrize("code", [code for code in LANGUAGE_WORDS if code not in {"lt", "lv"}])
def test_every_language_accepts_english_templates(code: str) -> None:
    language = get_language(code)
    assert set(LANGUAGE_WORDS["en"]["disambiguation_templates"]) <= set(language.disambiguation_templates)
    assert LANGUAGE_WORDS[code]["disambiguation_templates"]
    assert all(name == name.lower() for name in language.disambiguation_templates)


def test_articles_of_a_real_extract_are_kept(demo_dump) -> None:
    siteinfo = read_siteinfo(demo_dump.as_uri())
    pages = list(parse_pages([bz2.decompress(demo_dump.read_bytes())], "demo"))
    verdicts = {page.title: classify_page(page, siteinfo) for page in pages}
    assert Counter(verdict if isinstance(verdict, str) else "article" for verdict in verdicts.values()) == {
        "article": 96,
        "redirect": 99,
        "disambiguation": 8,
        "list": 2,
        "namespace": 1,
    }
    assert {title for title, verdict in verdicts.items() if verdict in {"disambiguation", "list"}} == {
        "Aa River",
        "Aberdeen (disambiguation)",
        "Ada",
        "Alien",
        "Animal (disambiguation)",
        "Argument (disambiguation)",
        "Asia Minor (disambiguation)",
        "Austin (disambiguation)",
        "List of Atlas Shrugged characters",
        "List of anthropologists",
    }


def test_siteinfo_is_read_without_the_rest_of_the_dump(tmp_path, page_xml, export_xml) -> None:
    path = tmp_path / "x.xml.bz2"
    path.write_bytes(bz2.compress(export_xml(language="de", dbname="dewiki")) + b"no bz2 at all")
    siteinfo = read_siteinfo(path.as_uri())
    assert (siteinfo.dbname, siteinfo.language) == ("dewiki", "de")
    assert siteinfo.base == "https://de.wikipedia.org/wiki/Main_Page"


@pytest.mark.parametrize(
    ("language", "names"),
    [
        ("de", {"bild": 6}),
        ("el", {"εικόνα": 6}),
        ("nb", {"bilde": 6}),
        ("pt-br", {"imagem": 6, "arquivo": 6, "ficheiro": 6}),
        ("uk", {"зображення": 6, "изображение": 6, "категория": 14}),
        ("zh", {"图像": 6, "圖片": 6, "分类": 14}),
        ("arz", {"صورة": 6, "ملف": 6}),  # falls back to Arabic
        ("", {}),
    ],
)
def test_older_namespace_names_are_known(language: str, names: dict[str, int]) -> None:
    assert names.items() <= get_namespace_aliases(language).items()
