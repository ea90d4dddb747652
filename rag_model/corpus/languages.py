"""The words of a language that are not in a dump's siteinfo: those of disambiguation, list and redirect pages.

The names are from the large Wikipedias' templates and titles. The English names are used besides each language's
own, because small wikis borrow English templates; a language that is not in the table has only the English names.
Hatnotes ("{{disambiguation needed}}", Russian "{{значения}}") are on articles: keep them out of this table.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Language:
    """The words of one language; compared without case, except for titles."""

    disambiguation_templates: tuple[str, ...] = ()
    disambiguation_titles: tuple[str, ...] = ()  # anywhere in a title, brackets included
    list_prefixes: tuple[str, ...] = ()
    list_suffixes: tuple[str, ...] = ()
    redirect_words: tuple[str, ...] = ()
    file_names: tuple[str, ...] = ()  # older names of the file namespace, which siteinfo leaves out


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
    file_names=("image",),
)

LANGUAGES: dict[str, Language] = {
    "ar": Language(
        disambiguation_templates=("توضيح", "صفحة توضيح"),
        disambiguation_titles=("(توضيح)",),
        list_prefixes=("قائمة ",),
        redirect_words=("#تحويل",),
        file_names=("صورة",),
    ),
    "bg": Language(
        disambiguation_templates=("пояснение", "пояснителна страница"),
        disambiguation_titles=("(пояснение)",),
        list_prefixes=("Списък на ", "Списък с "),
        redirect_words=("#пренасочване", "#виж"),
        file_names=("картинка",),
    ),
    "ca": Language(
        disambiguation_templates=("desambiguació", "biografia desambiguació"),
        disambiguation_titles=("(desambiguació)",),
        list_prefixes=("Llista d",),
        redirect_words=("#redirecció",),
        file_names=("imatge",),
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
        file_names=("billede",),
    ),
    "de": Language(
        disambiguation_templates=("begriffsklärung", "bkl"),
        disambiguation_titles=("(Begriffsklärung)",),
        list_prefixes=("Liste der ", "Liste von ", "Liste des ", "Liste deutscher ", "Listen "),
        redirect_words=("#weiterleitung",),
        file_names=("bild",),
    ),
    "es": Language(
        disambiguation_templates=("desambiguación", "desambiguacion", "desambig", "des"),
        disambiguation_titles=("(desambiguación)",),
        list_prefixes=("Lista de ", "Anexo:"),
        redirect_words=("#redirección", "#redireccion"),
        file_names=("imagen",),
    ),
    "fa": Language(
        disambiguation_templates=("ابهام‌زدایی", "ابهام زدایی"),
        disambiguation_titles=("(ابهام‌زدایی)", "(ابهام زدایی)"),
        list_prefixes=("فهرست ",),
        redirect_words=("#تغییر_مسیر", "#تغییرمسیر"),
        file_names=("تصویر",),
    ),
    "fi": Language(
        disambiguation_templates=("täsmennyssivu",),
        disambiguation_titles=("(täsmennyssivu)",),
        list_prefixes=("Luettelo ",),
        redirect_words=("#ohjaus", "#uudelleenohjaus"),
        file_names=("kuva",),
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
    "he": Language(
        disambiguation_templates=("פירושונים",),
        disambiguation_titles=("(פירושונים)",),
        list_prefixes=("רשימת ",),
        redirect_words=("#הפניה",),
        file_names=("תמונה",),
    ),
    "hu": Language(
        disambiguation_templates=("egyért", "egyértelműsítő lap"),
        disambiguation_titles=("(egyértelműsítő lap)",),
        list_suffixes=(" listája",),
        redirect_words=("#átirányítás",),
        file_names=("kép",),
    ),
    "id": Language(
        disambiguation_templates=("disambiguasi",),
        disambiguation_titles=("(disambiguasi)",),
        list_prefixes=("Daftar ",),
        redirect_words=("#alih",),
        file_names=("gambar",),
    ),
    "it": Language(
        disambiguation_templates=("disambigua",),
        disambiguation_titles=("(disambigua)",),
        list_prefixes=("Lista d", "Liste d", "Elenco d"),
        redirect_words=("#rinvia", "#rinvio", "#rimando"),
        file_names=("immagine",),
    ),
    "ja": Language(
        disambiguation_templates=("aimai", "曖昧さ回避", "人名の曖昧さ回避", "地名の曖昧さ回避"),
        disambiguation_titles=("(曖昧さ回避)",),
        list_suffixes=("一覧",),
        redirect_words=("#転送", "#リダイレクト", "＃転送", "＃リダイレクト"),
        file_names=("画像",),
    ),
    "ko": Language(
        disambiguation_templates=("동음이의", "동명이인"),
        disambiguation_titles=("(동음이의)",),
        list_suffixes=(" 목록",),
        redirect_words=("#넘겨주기",),
        file_names=("그림",),
    ),
    "nl": Language(
        disambiguation_templates=("dp", "doorverwijspagina", "dpachternaam"),
        disambiguation_titles=("(doorverwijspagina)",),
        list_prefixes=("Lijst van ", "Lijst met "),
        redirect_words=("#doorverwijzing",),
        file_names=("afbeelding",),
    ),
    "no": Language(
        disambiguation_templates=("peker", "pekerside"),
        disambiguation_titles=("(andre betydninger)",),
        list_prefixes=("Liste over ",),
        redirect_words=("#omdirigering",),
        file_names=("bilde",),
    ),
    "pl": Language(
        disambiguation_templates=("ujednoznacznienie", "ujedn"),
        disambiguation_titles=("(ujednoznacznienie)",),
        list_prefixes=("Lista ",),
        redirect_words=("#patrz", "#przekieruj", "#tam"),
        file_names=("grafika",),
    ),
    "pt": Language(
        disambiguation_templates=("desambiguação", "desambig", "desamb"),
        disambiguation_titles=("(desambiguação)",),
        list_prefixes=("Lista d", "Anexo:"),
        redirect_words=("#redirecionamento",),
        file_names=("imagem",),
    ),
    "ru": Language(
        disambiguation_templates=("неоднозначность", "список однофамильцев"),
        disambiguation_titles=("(значения)",),
        list_prefixes=("Список ", "Списки "),
        redirect_words=("#перенаправление", "#перенапр"),
        file_names=("изображение",),
    ),
    "sv": Language(
        disambiguation_templates=("förgrening", "förgreningssida", "gren", "grensida"),
        disambiguation_titles=("(olika betydelser)",),
        list_prefixes=("Lista över ", "Lista på "),
        redirect_words=("#omdirigering",),
        file_names=("bild",),
    ),
    "tr": Language(
        disambiguation_templates=("anlam ayrımı", "anlamayrımı"),
        disambiguation_titles=("(anlam ayrımı)",),
        list_suffixes=(" listesi",),
        redirect_words=("#yönlendirme", "#yönlendir"),
        file_names=("resim",),
    ),
    "uk": Language(
        disambiguation_templates=("неоднозначність",),
        disambiguation_titles=("(значення)",),
        list_prefixes=("Список ", "Списки "),
        redirect_words=("#перенаправлення", "#перенапр"),
        file_names=("зображення",),
    ),
    "vi": Language(
        disambiguation_templates=("định hướng", "trang định hướng"),
        disambiguation_titles=("(định hướng)",),
        list_prefixes=("Danh sách ",),
        redirect_words=("#đổi",),
        file_names=("hình",),
    ),
    "zh": Language(
        disambiguation_templates=("消歧义", "消歧義", "消歧义页", "消歧義頁"),
        disambiguation_titles=("(消歧义)", "(消歧義)"),
        list_suffixes=("列表",),
        redirect_words=("#重定向",),
        file_names=("图像", "圖像"),
    ),
}


def language_of(code: str) -> Language:
    """Return the words of a language (`de`, `pt-BR`, …) and the English ones; only the latter for an unknown one."""
    own = LANGUAGES.get(code.lower().partition("-")[0], Language())
    names = [field.name for field in fields(Language)]
    return Language(**{name: getattr(own, name) + getattr(ENGLISH, name) for name in names})
