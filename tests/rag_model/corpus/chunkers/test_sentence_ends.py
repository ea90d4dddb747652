"""Sentences end where readers of many scripts see them end."""

import pytest

from rag_model.corpus.chunkers.running import SENTENCE, run_together
from rag_model.corpus.records import Article, Section


def sentences(text: str) -> list[str]:
    running = run_together(Article("1", 0, "T", (Section("", text),)))
    return [running.text(span) for span in running.pieces((0, len(running.words)), SENTENCE)]


@pytest.mark.parametrize(
    "expected",
    [
        ["It ended.", "Then it began."],
        ["Dr. Jones met Mrs. Smith on Sept. 5 in St. Louis.", "They left."],
        ["J. R. R. Tolkien and George W. Bush never met.", "(So it seems.)", "They might have!"],
        ["He moved to the U.S. Senate, e.g. in No. 12, cf. Fig. 3.4 of vol. 2."],
        ['"Is it?" she asked.', '"It is."', "He nodded."],
        ["Wait … what?", "Well...", "Perhaps.", "No."],
        ["It costs 3.5 million.", "In 1990.", "2000 came later."],
        ["Am 3. Oktober 1990 trat die DDR bei, bzw. sie trat aus.", "Das war z. B. in Berlin."],
        ["¿Dónde está?", "¡Aquí!", "«C'est vrai.»", "Il a dit : non."],
        ["Yahoo! is a company.", "Who? me?", "Yes."],
        ["Он родился в 1799 г. в Москве.", "Умер в 1837."],
        ["यह एक वाक्य है।", "यह दूसरा है।"],
        ["هل هذا صحيح؟", "نعم هذا صحيح۔", "انتهى"],
        ["ይህ ነው።", "ሌላ ነው።"],
    ],
    ids=lambda expected: expected[0][:20],
)
def test_sentences_of_spaced_scripts(expected: list[str]) -> None:
    assert sentences(" ".join(expected)) == expected


def test_sentences_of_scripts_without_spaces() -> None:
    expected = ["日本の首都は東京である。", "「本当ですか？」", "はい、そうです！", "次の文はここで終わります"]
    assert sentences("".join(expected)) == expected


def test_lines_end_sentences_unless_they_are_wrapped() -> None:
    text = "Cities:\nRome\nParis\n\nThe line was wrapped\nby an editor.\nthe next was not"
    assert sentences(text) == ["Cities:", "Rome", "Paris", "The line was wrapped by an editor.", "the next was not"]
