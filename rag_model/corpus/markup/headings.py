"""Headings: where sections begin, and which sections contain no prose.

DPR's corpus has only running text. Lists of references, links and books under the usual headings answer no
question and would be a tenth of all passages, so such sections are dropped with their subsections.
The table is small on purpose: a heading that is missing costs a few useless passages, a heading that is wrongly in
it costs answers ("Works" and "Filmography" are kept).
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_HEADING = re.compile(r"^=.*=[ \t]*$", re.MULTILINE)

APPARATUS: dict[str, frozenset[str]] = {
    language: frozenset(names.split(", "))
    for language, names in {
        "en": "references, external links, see also, further reading, bibliography, notes, sources, "
        "citations, footnotes, notes and references, references and notes, works cited, external sources, "
        "references and sources, notes and citations, citations and references, sources and references, "
        "references and further reading, general references, cited sources, literature cited, endnotes, "
        "notes and sources, links, further reading and external links, literature, related reading, see "
        "also and references, explanatory notes, citations and notes, notes citations and references, "
        "reference list, primary sources, secondary sources, references and external links, external links "
        "and references, additional reading, additional sources, suggested reading, selected bibliography, "
        "general sources, bibliography and further reading, cited references",
        "de": "einzelnachweise, weblinks, literatur, siehe auch, quellen, anmerkungen, fußnoten, belege, nachweise",
        "fr": "notes et références, références, liens externes, voir aussi, bibliographie, notes, "
        "articles connexes, annexes, lien externe, sources, note",
        "es": "referencias, enlaces externos, véase también, bibliografía, notas, notas y referencias, fuentes",
        "it": "note, collegamenti esterni, voci correlate, bibliografia, altri progetti, fonti",
        "pt": "referências, ligações externas, ver também, bibliografia, notas, notas e referências",
        "nl": "referenties, externe links, externe link, zie ook, bronnen, literatuur, noten, voetnoten, "
        "bronnen noten en/of referenties",
        "pl": "przypisy, linki zewnętrzne, zobacz też, bibliografia, uwagi",
        "ru": "примечания, ссылки, литература, см. также, источники, комментарии",
        "uk": "примітки, посилання, література, див. також, джерела",
        "bg": "източници, външни препратки, вижте също, литература, бележки, външна препратка",
        "sv": "referenser, externa länkar, se även, källor, noter, fotnoter, litteratur, vidare läsning",
        "cs": "reference, externí odkazy, související články, literatura, poznámky",
        "ja": "脚注, 外部リンク, 関連項目, 参考文献, 出典, 注釈",
        "zh": "参考文献, 外部链接, 参见, 參考文獻, 外部連結, 參見, 注释, 註釋, 参考资料, 參考資料, 相关条目, 延伸阅读",
        "ko": "각주, 외부 링크, 같이 보기, 참고 문헌, 참고문헌",
        "ar": "مراجع, وصلات خارجية, انظر أيضا, المراجع, انظر أيضًا, مصادر, هوامش",
        "simple": "references, other websites, related pages, further reading, notes, sources",
    }.items()
}


class RawSection(NamedTuple):
    """A heading as in the wikitext, and the markup below it up to the next heading."""

    level: int  # 1 to 6; 0 for the lead
    heading: str
    body: str


def split_sections(text: str) -> Iterator[RawSection]:
    """Yield the sections of a page in order, the lead first, even if it is empty."""
    level, heading, start = 0, "", 0
    for line in _HEADING.finditer(text):
        marked = line[0].rstrip()
        depth = min(_run(marked), _run(marked[::-1]), (len(marked) - 1) // 2, 6)
        if depth:
            yield RawSection(level, heading, text[start : line.start()])
            level, heading, start = depth, marked[depth:-depth].strip(), line.end()
    yield RawSection(level, heading, text[start:])


def is_apparatus(heading: str, language: str) -> bool:
    """Return whether a section with this heading contains references, links or reading lists."""
    name = heading.strip(" :").replace(",", "").lower()
    return name in APPARATUS.get(language, frozenset()) or name in APPARATUS["en"]


def _run(text: str) -> int:
    return len(text) - len(text.lstrip("="))
