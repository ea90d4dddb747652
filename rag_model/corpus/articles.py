"""Decide which pages are articles, by the rules of DPR, with the words of each language.

DPR (Karpukhin et al. 2020, section 4.1) used DrQA's preparation: WikiExtractor leaves out
redirects, other namespaces and pages with a disambiguation template; `prep_wikipedia.py` drops
titles with "(disambiguation)" and those that start with "List of", "Index of" or "Outline of". Here
these rules apply in each language.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Literal

from rag_model.corpus.records import Page, Siteinfo


@dataclass(frozen=True, slots=True)
class Language:
    """The words of one language; compared case-insensitively, except in titles."""

    disambiguation_templates: tuple[str, ...] = ()
    disambiguation_titles: tuple[str, ...] = ()  # anywhere in a title, including the brackets
    list_prefixes: tuple[str, ...] = ()
    list_suffixes: tuple[str, ...] = ()
    redirect_words: tuple[str, ...] = ()


ENGLISH = Language(
    disambiguation_templates=(
        "disambiguation",
        "disambig",
        "disamb",
        "dab",
        "dabpage",
        "disambiguation page",
        "disambiguation cleanup",
        "disambig-cleanup",
        "dab-cleanup",
        "hndis",
        "hndis-cleanup",
        "human name disambiguation",
        "geodis",
        "placedis",
        "place name disambiguation",
        "numberdis",
        "letter disambiguation",
        "letter-number combination disambiguation",
        "letter–number combination disambiguation",
        "letternumbercombdisambig",
        "latindab",
        "mathdab",
        "roaddis",
        "airport disambiguation",
        "airport disambig",
        "call sign disambiguation",
        "callsigndis",
        "biology disambiguation",
        "chinese title disambiguation",
        "chemistry disambiguation",
        "church disambiguation",
        "genus disambiguation",
        "hospital disambiguation",
        "mathematical disambiguation",
        "mathematics disambiguation",
        "military unit disambiguation",
        "music disambiguation",
        "phonetics disambiguation",
        "port disambiguation",
        "road disambiguation",
        "schooldis",
        "school disambiguation",
        "species latin name disambiguation",
        "species latin name abbreviation disambiguation",
        "station disambiguation",
        "synagogue disambiguation",
        "taxonomic authority disambiguation",
        "taxonomy disambiguation",
        "wpdab",
    ),
    disambiguation_titles=("(disambiguation)", "(disambiguation page)"),
    list_prefixes=("List of ", "Lists of ", "Index of ", "Outline of "),
    redirect_words=("#redirect",),
)

LANGUAGES: dict[str, Language] = {
    "ar": Language(
        disambiguation_templates=("توضيح", "صفحة توضيح"),
        disambiguation_titles=("(توضيح)",),
        list_prefixes=("قائمة ",),
        redirect_words=("#تحويل",),
    ),
    "be": Language(
        disambiguation_templates=("неадназначнасць",),
        disambiguation_titles=("(значэнні)",),
        list_prefixes=("Спіс ",),
        redirect_words=("#перанакіраваньне",),
    ),
    "bg": Language(
        disambiguation_templates=("пояснение", "пояснителна страница"),
        disambiguation_titles=("(пояснение)",),
        list_prefixes=("Списък на ", "Списък с "),
        redirect_words=("#пренасочване", "#виж"),
    ),
    "bn": Language(
        disambiguation_templates=("দ্ব্যর্থতা নিরসন",),
        disambiguation_titles=("(দ্ব্যর্থতা নিরসন)",),
        list_suffixes=(" তালিকা",),
        redirect_words=(
            "#পুনর্নির্দেশ",
            "#পুনঃর্নির্দেশ",
            "#পুনঃনির্দেশ",
            "#পুননির্দেশ",
        ),
    ),
    "ca": Language(
        disambiguation_templates=("desambiguació", "biografia desambiguació"),
        disambiguation_titles=("(desambiguació)",),
        list_prefixes=("Llista d",),
        redirect_words=("#redirecció",),
    ),
    "cs": Language(
        disambiguation_templates=("rozcestník", "rozcestník - příjmení"),
        disambiguation_titles=("(rozcestník)",),
        list_prefixes=("Seznam ",),
        redirect_words=("#přesměruj",),
    ),
    "da": Language(
        disambiguation_templates=("flertydig",),
        disambiguation_titles=("(flertydig)",),
        list_prefixes=("Liste over ",),
        redirect_words=("#omdirigering",),
    ),
    "de": Language(
        disambiguation_templates=("begriffsklärung", "bkl"),
        disambiguation_titles=("(Begriffsklärung)",),
        list_prefixes=("Liste der ", "Liste von ", "Liste des ", "Liste deutscher ", "Listen "),
        redirect_words=("#weiterleitung",),
    ),
    "el": Language(
        disambiguation_templates=("αποσαφήνιση",),
        disambiguation_titles=("(αποσαφήνιση)",),
        list_prefixes=("Κατάλογος ",),
        redirect_words=("#ανακατευθυνση",),
    ),
    "eo": Language(
        disambiguation_templates=("apartigilo",),
        disambiguation_titles=("(apartigilo)",),
        list_prefixes=("Listo de ",),
        redirect_words=(
            "#alidirekti",
            "#alidirektu",
            "#al",
        ),
    ),
    "es": Language(
        disambiguation_templates=("desambiguación", "desambiguacion", "desambig", "des"),
        disambiguation_titles=("(desambiguación)",),
        list_prefixes=("Lista de ", "Anexo:"),
        redirect_words=("#redirección", "#redireccion"),
    ),
    "et": Language(
        disambiguation_templates=("täpsustuslehekülg",),
        disambiguation_titles=("(täpsustus)",),
        list_suffixes=(" loend",),
        redirect_words=("#suuna",),
    ),
    "eu": Language(
        disambiguation_templates=("argipen",),
        disambiguation_titles=("(argipena)",),
        list_suffixes=(" zerrenda",),
        redirect_words=("#birzuzendu",),
    ),
    "fa": Language(
        disambiguation_templates=("ابهام‌زدایی", "ابهام زدایی"),
        disambiguation_titles=("(ابهام‌زدایی)", "(ابهام زدایی)"),
        list_prefixes=("فهرست ",),
        redirect_words=("#تغییر_مسیر", "#تغییرمسیر"),
    ),
    "fi": Language(
        disambiguation_templates=("täsmennyssivu",),
        disambiguation_titles=("(täsmennyssivu)",),
        list_prefixes=("Luettelo ",),
        redirect_words=("#ohjaus", "#uudelleenohjaus"),
    ),
    "fr": Language(
        disambiguation_templates=(
            "homonymie",
            "homonymes",
            "homonyme",
            "paronymie",
            "patronymie",
            "toponymie",
            "homonymie de personnes",
            "homonymie de localités",
            "homonymie de clubs sportifs",
            "homonymie de monuments",
            "homonymie de bateaux",
        ),
        disambiguation_titles=("(homonymie)",),
        list_prefixes=("Liste d", "Listes d"),
        redirect_words=("#redirection",),
    ),
    "gl": Language(
        disambiguation_templates=("homónimos",),
        disambiguation_titles=("(homónimos)",),
        list_prefixes=("Lista de ",),
        redirect_words=(
            "#redirección",
            "#redirecionamento",
        ),
    ),
    "he": Language(
        disambiguation_templates=("פירושונים",),
        disambiguation_titles=("(פירושונים)",),
        list_prefixes=("רשימת ",),
        redirect_words=("#הפניה",),
    ),
    "hi": Language(
        disambiguation_templates=("बहुविकल्पी",),
        disambiguation_titles=("(बहुविकल्पी)",),
        list_suffixes=(" की सूची",),
        redirect_words=(
            "#पुनर्प्रेषित",
            "#अनुप्रेषित",
        ),
    ),
    "hr": Language(
        disambiguation_templates=("razdvojba",),
        disambiguation_titles=("(razdvojba)",),
        list_prefixes=("Popis ",),
        redirect_words=("#preusmjeri",),
    ),
    "hu": Language(
        disambiguation_templates=("egyért", "egyértelműsítő lap"),
        disambiguation_titles=("(egyértelműsítő lap)",),
        list_suffixes=(" listája",),
        redirect_words=("#átirányítás",),
    ),
    "hy": Language(
        disambiguation_templates=("բազմիմաստություն",),
        disambiguation_titles=("(այլ կիրառումներ)",),
        list_suffixes=(" ցանկ",),
        redirect_words=("#վերահղում",),
    ),
    "id": Language(
        disambiguation_templates=("disambiguasi",),
        disambiguation_titles=("(disambiguasi)",),
        list_prefixes=("Daftar ",),
        redirect_words=("#alih",),
    ),
    "it": Language(
        disambiguation_templates=("disambigua",),
        disambiguation_titles=("(disambigua)",),
        list_prefixes=("Lista d", "Liste d", "Elenco d"),
        redirect_words=("#rinvia", "#rinvio", "#rimando"),
    ),
    "ja": Language(
        disambiguation_templates=("aimai", "曖昧さ回避", "人名の曖昧さ回避", "地名の曖昧さ回避"),
        disambiguation_titles=("(曖昧さ回避)",),
        list_suffixes=("一覧",),
        redirect_words=("#転送", "#リダイレクト", "＃転送", "＃リダイレクト"),
    ),
    "ko": Language(
        disambiguation_templates=("동음이의", "동명이인"),
        disambiguation_titles=("(동음이의)",),
        list_suffixes=(" 목록",),
        redirect_words=("#넘겨주기",),
    ),
    "mr": Language(
        disambiguation_templates=("निःसंदिग्धीकरण",),
        disambiguation_titles=("(निःसंदिग्धीकरण)",),
        list_suffixes=(" यादी",),
        redirect_words=(
            "#पुनर्निर्देशन",
            "#पुर्ननिर्देशन",
        ),
    ),
    "nl": Language(
        disambiguation_templates=("dp", "doorverwijspagina", "dpachternaam"),
        disambiguation_titles=("(doorverwijspagina)",),
        list_prefixes=("Lijst van ", "Lijst met "),
        redirect_words=("#doorverwijzing",),
    ),
    "no": Language(
        disambiguation_templates=("peker", "pekerside"),
        disambiguation_titles=("(andre betydninger)",),
        list_prefixes=("Liste over ",),
        redirect_words=("#omdirigering",),
    ),
    "pl": Language(
        disambiguation_templates=("ujednoznacznienie", "ujedn"),
        disambiguation_titles=("(ujednoznacznienie)",),
        list_prefixes=("Lista ",),
        redirect_words=("#patrz", "#przekieruj", "#tam"),
    ),
    "pt": Language(
        disambiguation_templates=("desambiguação", "desambig", "desamb"),
        disambiguation_titles=("(desambiguação)",),
        list_prefixes=("Lista d", "Anexo:"),
        redirect_words=("#redirecionamento",),
    ),
    "ro": Language(
        disambiguation_templates=("dezambiguizare",),
        disambiguation_titles=("(dezambiguizare)",),
        list_prefixes=("Listă de ",),
        redirect_words=("#redirecteaza",),
    ),
    "ru": Language(
        disambiguation_templates=("неоднозначность", "список однофамильцев"),
        disambiguation_titles=("(значения)",),
        list_prefixes=("Список ", "Списки "),
        redirect_words=("#перенаправление", "#перенапр"),
    ),
    "sk": Language(
        disambiguation_templates=("rozlišovacia stránka",),
        disambiguation_titles=("(rozlišovacia stránka)",),
        list_prefixes=("Zoznam ",),
        redirect_words=("#presmeruj",),
    ),
    "sl": Language(
        disambiguation_templates=("razločitev",),
        disambiguation_titles=("(razločitev)",),
        list_prefixes=("Seznam ",),
        redirect_words=("#preusmeritev",),
    ),
    "sr": Language(
        disambiguation_templates=("вишезначна одредница",),
        disambiguation_titles=("(вишезначна одредница)",),
        list_prefixes=("Списак ",),
        redirect_words=(
            "#преусмери",
            "#преусмјери",
            "#preusmeri",
            "#preusmjeri",
        ),
    ),
    "sv": Language(
        disambiguation_templates=("förgrening", "förgreningssida", "gren", "grensida"),
        disambiguation_titles=("(olika betydelser)",),
        list_prefixes=("Lista över ", "Lista på "),
        redirect_words=("#omdirigering",),
    ),
    "th": Language(
        disambiguation_templates=("แก้กำกวม",),
        disambiguation_titles=("(แก้ความกำกวม)",),
        list_prefixes=("รายชื่อ",),
        redirect_words=("#เปลี่ยนทาง",),
    ),
    "tr": Language(
        disambiguation_templates=("anlam ayrımı", "anlamayrımı"),
        disambiguation_titles=("(anlam ayrımı)",),
        list_suffixes=(" listesi",),
        redirect_words=("#yönlendirme", "#yönlendir"),
    ),
    "uk": Language(
        disambiguation_templates=("неоднозначність",),
        disambiguation_titles=("(значення)",),
        list_prefixes=("Список ", "Списки "),
        redirect_words=("#перенаправлення", "#перенапр"),
    ),
    "vi": Language(
        disambiguation_templates=("định hướng", "trang định hướng"),
        disambiguation_titles=("(định hướng)",),
        list_prefixes=("Danh sách ",),
        redirect_words=("#đổi",),
    ),
    "zh": Language(
        disambiguation_templates=("消歧义", "消歧義", "消歧义页", "消歧義頁"),
        disambiguation_titles=("(消歧义)", "(消歧義)"),
        list_suffixes=("列表",),
        redirect_words=("#重定向",),
    ),
}


# Aliases of the namespaces of files and categories (MediaWiki's `$namespaceAliases`), which the
# siteinfo of a dump does not list. The aliases of all variants of a language are in one entry.
_FILE_NAMES = """
ab Файл | ace Berkas, Gambar | af Beeld | aln Figura | ang Biliþ | ar صورة | ary ملف | arz صورة |
as चित्र, চিত্র | ast Imaxe, Imaxen, Archivu | avk Ewava | az Şəkil | ba Рәсем | bcc تصویر | be
Выява | bg Картинка | bgn اکس | bjn Berkas | br Skeudenn | bs Slika | ca Imatge | ce Сурт, Хlум |
ceb Imahen | crh Resim, Ресим | cu Ви́дъ, Видъ | da Billede | de Bild | dsb Wobraz | dv ފައިލް |
el Εικόνα | es Imagen | et Pilt | eu Irudi | fa تصویر | ff Fichier | fi Kuva | frp Émâge | gag
Dosya | gl Imaxe | glk پرونده | haw Kiʻi | he תמונה | hr Slika | hsb Wobraz | ht Imaj | hu Kép |
ia Imagine | id Gambar | ig Ákwúkwó orünotu | io Imajo | it Immagine | ja 画像 | jv Gambar | ka
სურათი | kiu Dosya | kk Сурет, Swret, سۋرەت | kl Fil, Billede | km រូបភាព | ko 그림 | ksh Beld,
Belld | kv Файл | la Imago | lad Archivo, Dossia | lb Bild | li Aafbeilding | lij Immagine | lmo
Immagine | lrc أسگ | lzz Dosya | mdf Изображение | mhr Файл | min Berkas | mk Слика | ml ചി,
ചിത്രം, പ്ര | mn Зураг | ms Imej | mwl Ficheiro, Imagem | mzn تصویر, پرونده | nah Imagen | nan 文件
| nap Immagine |  nds Datei, Ofbeelding | nl Afbeelding | no Bilde | oc Imatge | os Ныв
| pdc Datei | pfl Datei | pl Grafika | pnb تصویر | pnt Εικόναν | ps انځور | pt Imagem, Arquivo,
Ficheiro | ro Imagine, Fişier | ru Изображение | sa चित्रं, चित्रम् | sah Ойуу | sc Immàgini | scn
Mmàggini | sd عڪس | sgs Vaizdas | si රූපය | sk Obrázok | sq Figura | sr Slika, Слика | srn
Afbeelding | sv Bild | sw Picha | tay biru' na zayzyuwaw | te బొమ్మ, ఫైలు | th ภาพ | tr Resim | tt
Изображение, Рәсем, Räsem | udm Суред | uk Зображення, Изображение | ur تصویر, ملف | uz Tasvir |
vec Imàjine | vi Hình | vo Magod | war Fayl | xal Зург | yi בילד | yo Àwòrán | yue 檔, 檔案, 档, 档案,
圖, 圖像, 图, 图像 | zh 文件, 档案, 图像, 图片, 檔案, 圖像, 圖片
"""
_CATEGORY_NAMES = """
ab Категория | ace Kategori | aln Kategori | as श्रेणी, শ্রেণী | ba Төркөм | bcc رده | bjn
Kategori | bxr Категория | ce Тоба, Кадегар | crh Kategoriya, Категория | diq Kategori, Kategoriye
| ext Categoria | ff Catégorie | ga Rang | gag Kategori | glk رده | gom श्रेणी | ig Ébéonọr | kbd
Категория | kiu Kategori | kk Санат, Sanat, سانات | kl Kategori | km ចំណាត់ថ្នាក់ក្រុម,
ចំណាត់ក្រុម, ចំនាត់ថ្នាក់ក្រុម | ksh Sachjrop, Saachjrop, Saachjropp, Kattejori, Kategorie,
Katejori | kv Категория | kw Class | lad Categoría, Katēggoría | lez Категория | li Kategorie |
lij Categoria | lmo Categuria | lzz Kategori | mdf Категория | mg Catégorie | mhr Категория | min
Kategori | ml വി, വ, വിഭാഗം, വർഗ്ഗം | mwl Categoria | mzn رده | nah Categoría | nan 分類 | nap
Categoria | nds Kategorie, Categorie, Kattegerie | or ବିଭାଗ | pdc Kategorie | pfl Kategorie,
Kadegorie | sgs Kategorija | sq Kategori | sr Kategorija, Категорија | srn Categorie | szl
Kategoria | tet Kategoría | tl Kaurian | tt Категория, Törkem | tyv Категория | uk Категория | uz
Kategoriya | wo Catégorie | xal Янз | yi קאטעגאריע | yue 類, 类, 分类 | zh 分类, 分類
"""
_FILE, _CATEGORY = 6, 14


def _parse_names(table: str) -> dict[str, list[str]]:
    entries = (entry.split(" ", 1) for entry in " ".join(table.split()).split(" | "))
    return {code: names.lower().split(", ") for code, names in entries}


_NAMESPACE_NAMES = {_FILE: _parse_names(_FILE_NAMES), _CATEGORY: _parse_names(_CATEGORY_NAMES)}


def get_namespace_aliases(code: str) -> dict[str, int]:
    """Return the aliases, in lower case, of the namespaces of a wiki in this language.

    >>> get_namespace_aliases("el")
    {'εικόνα': 6}
    """
    language = get_base_language(code)
    return {name: key for key, names in _NAMESPACE_NAMES.items() for name in names.get(language, [])}


def get_base_language(code: str) -> str:
    """Return the language code that the tables of this module use.

    >>> get_base_language("pt-BR"), get_base_language("nb")
    ('pt', 'no')
    """
    base = code.lower().partition("-")[0]
    return "no" if base == "nb" else base


def get_language(code: str) -> Language:
    """Return the words of a language (`de`, `pt-BR`, …) together with the English ones."""
    language = LANGUAGES.get(get_base_language(code), Language())
    field_names = [field.name for field in fields(Language)]
    return Language(**{name: getattr(language, name) + getattr(ENGLISH, name) for name in field_names})


DropReason = Literal["namespace", "redirect", "not_wikitext", "empty", "disambiguation", "list"]


def classify_page(page: Page, siteinfo: Siteinfo) -> Page | DropReason:
    """Return the page if it is an article, otherwise the first `DropReason` that applies.

    Looks at the title, the start of the text and the names of templates, without parsing.
    """
    patterns = _page_patterns(siteinfo.language)
    return next((reason for reason, applies in _REASONS.items() if applies(page, patterns)), page)


@dataclass(frozen=True, slots=True)
class _PagePatterns:
    language: Language
    redirect: re.Pattern[str]
    disambiguation: re.Pattern[str]


@cache
def _page_patterns(code: str) -> _PagePatterns:
    language = get_language(code)
    template_names = "|".join(re.escape(name).replace(r"\ ", "[ _]") for name in language.disambiguation_templates)
    templates = rf"\{{\{{[\s_]*(?i:{template_names})[\s_]*(?:\||\}}\}}|<!--)|__DISAMBIG__"
    redirect_words = "|".join(map(re.escape, language.redirect_words))
    redirect = rf"\s*+(?:{redirect_words})\s*+:?\s*+\[\["
    return _PagePatterns(language, re.compile(redirect, re.IGNORECASE), re.compile(templates))


def _is_disambiguation(page: Page, patterns: _PagePatterns) -> bool:
    in_title = any(title_mark in page.title for title_mark in patterns.language.disambiguation_titles)
    return in_title or patterns.disambiguation.search(page.text) is not None


def _is_list(page: Page, patterns: _PagePatterns) -> bool:
    language = patterns.language
    return page.title.startswith(language.list_prefixes) or page.title.endswith(language.list_suffixes)


_REASONS: dict[DropReason, Callable[[Page, _PagePatterns], bool]] = {
    "namespace": lambda page, _: page.namespace != 0,
    "redirect": lambda page, words: page.redirect or words.redirect.match(page.text) is not None,
    "not_wikitext": lambda page, _: page.model != "wikitext",
    "empty": lambda page, _: not page.text.strip(),
    "disambiguation": _is_disambiguation,
    "list": _is_list,
}
