"""What a dump's own siteinfo does not say of its language: how disambiguation, list and redirect pages look.

The names are those of the large Wikipedias' own templates and titles. What English says holds everywhere beside a
language's own words, because small wikis borrow its templates; a language that is not here has English alone.
"""

from dataclasses import dataclass


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
    # {{disambiguation}}, its shortcuts, and those for one kind of name; not hatnotes such as {{disambiguation needed}}.
    (
        "disambiguation", "disambig", "disamb", "dab", "dabpage", "disambiguation page", "disambiguation cleanup",
        "disambig-cleanup", "dab-cleanup", "hndis", "hndis-cleanup", "human name disambiguation", "geodis", "placedis",
        "place name disambiguation", "numberdis", "letter disambiguation", "letter-number combination disambiguation",
        "letter–number combination disambiguation", "letternumbercombdisambig", "latindab", "mathdab", "roaddis",
        "airport disambiguation", "airport disambig", "call sign disambiguation", "callsigndis", "biology disambiguation",
        "chinese title disambiguation", "chemistry disambiguation", "church disambiguation", "genus disambiguation",
        "hospital disambiguation", "mathematical disambiguation", "mathematics disambiguation", "military unit disambiguation",
        "music disambiguation", "phonetics disambiguation", "port disambiguation", "road disambiguation", "schooldis",
        "school disambiguation", "species latin name disambiguation", "species latin name abbreviation disambiguation",
        "station disambiguation", "synagogue disambiguation", "taxonomic authority disambiguation",
        "taxonomy disambiguation", "wpdab",
    ),
    ("(disambiguation)", "(disambiguation page)"),
    ("List of ", "Lists of ", "Index of ", "Outline of "),
    redirect_words=("#redirect",),
    file_names=("image",),
)  # fmt: skip

LANGUAGES: dict[str, Language] = {
    "ar": Language(("توضيح", "صفحة توضيح"), ("(توضيح)",), ("قائمة ",), (), ("#تحويل",), ("صورة",)),
    "bg": Language(("пояснение", "пояснителна страница"), ("(пояснение)",), ("Списък на ", "Списък с "), (), ("#пренасочване", "#виж"), ("картинка",)),
    "ca": Language(("desambiguació", "biografia desambiguació"), ("(desambiguació)",), ("Llista d",), (), ("#redirecció",), ("imatge",)),
    "cs": Language(("rozcestník", "rozcestník - příjmení"), ("(rozcestník)",), ("Seznam ",), (), ("#přesměruj",)),
    "da": Language(("flertydig",), ("(flertydig)",), ("Liste over ",), (), ("#omdirigering",), ("billede",)),
    "de": Language(("begriffsklärung", "bkl"), ("(Begriffsklärung)",), ("Liste der ", "Liste von ", "Liste des ", "Liste deutscher ", "Listen "), (), ("#weiterleitung",), ("bild",)),
    "es": Language(("desambiguación", "desambiguacion", "desambig", "des"), ("(desambiguación)",), ("Lista de ", "Anexo:"), (), ("#redirección", "#redireccion"), ("imagen",)),
    "fa": Language(("ابهام‌زدایی", "ابهام زدایی"), ("(ابهام‌زدایی)", "(ابهام زدایی)"), ("فهرست ",), (), ("#تغییر_مسیر", "#تغییرمسیر"), ("تصویر",)),
    "fi": Language(("täsmennyssivu",), ("(täsmennyssivu)",), ("Luettelo ",), (), ("#ohjaus", "#uudelleenohjaus"), ("kuva",)),
    "fr": Language(("homonymie", "homonymes", "homonyme", "paronymie", "patronymie", "toponymie", "homonymie de personnes", "homonymie de localités", "homonymie de clubs sportifs", "homonymie de monuments", "homonymie de bateaux"), ("(homonymie)",), ("Liste d", "Listes d"), (), ("#redirection",)),
    "he": Language(("פירושונים",), ("(פירושונים)",), ("רשימת ",), (), ("#הפניה",), ("תמונה",)),
    "hu": Language(("egyért", "egyértelműsítő lap"), ("(egyértelműsítő lap)",), (), (" listája",), ("#átirányítás",), ("kép",)),
    "id": Language(("disambiguasi",), ("(disambiguasi)",), ("Daftar ",), (), ("#alih",), ("gambar",)),
    "it": Language(("disambigua",), ("(disambigua)",), ("Lista d", "Liste d", "Elenco d"), (), ("#rinvia", "#rinvio", "#rimando"), ("immagine",)),
    "ja": Language(("aimai", "曖昧さ回避", "人名の曖昧さ回避", "地名の曖昧さ回避"), ("(曖昧さ回避)",), (), ("一覧",), ("#転送", "#リダイレクト", "＃転送", "＃リダイレクト"), ("画像",)),
    "ko": Language(("동음이의", "동명이인"), ("(동음이의)",), (), (" 목록",), ("#넘겨주기",), ("그림",)),
    "nl": Language(("dp", "doorverwijspagina", "dpachternaam"), ("(doorverwijspagina)",), ("Lijst van ", "Lijst met "), (), ("#doorverwijzing",), ("afbeelding",)),
    "no": Language(("peker", "pekerside"), ("(andre betydninger)",), ("Liste over ",), (), ("#omdirigering",), ("bilde",)),
    "pl": Language(("ujednoznacznienie", "ujedn"), ("(ujednoznacznienie)",), ("Lista ",), (), ("#patrz", "#przekieruj", "#tam"), ("grafika",)),
    "pt": Language(("desambiguação", "desambig", "desamb"), ("(desambiguação)",), ("Lista d", "Anexo:"), (), ("#redirecionamento",), ("imagem",)),
    "ru": Language(("неоднозначность", "значения", "список однофамильцев"), ("(значения)",), ("Список ", "Списки "), (), ("#перенаправление", "#перенапр"), ("изображение",)),
    "sv": Language(("förgrening", "förgreningssida", "gren", "grensida"), ("(olika betydelser)",), ("Lista över ", "Lista på "), (), ("#omdirigering",), ("bild",)),
    "tr": Language(("anlam ayrımı", "anlamayrımı"), ("(anlam ayrımı)",), (), (" listesi",), ("#yönlendirme", "#yönlendir"), ("resim",)),
    "uk": Language(("неоднозначність",), ("(значення)",), ("Список ", "Списки "), (), ("#перенаправлення", "#перенапр"), ("зображення",)),
    "vi": Language(("định hướng", "trang định hướng"), ("(định hướng)",), ("Danh sách ",), (), ("#đổi",), ("hình",)),
    "zh": Language(("消歧义", "消歧義", "消歧义页", "消歧義頁"), ("(消歧义)", "(消歧義)"), (), ("列表",), ("#重定向",), ("图像", "圖像")),
}  # fmt: skip


def language_of(code: str) -> Language:
    """Return a language's words joined with English ones; an unknown `code` (`en`, `pt-BR`, …) has English alone."""
    own = LANGUAGES.get(code.lower().partition("-")[0], Language())
    return Language(
        *(
            getattr(own, name)
            + tuple(word for word in getattr(ENGLISH, name) if word not in getattr(own, name))
            for name in Language.__dataclass_fields__
        )
    )
