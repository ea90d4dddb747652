"""The relative findings of Lewis et al. 2020 (arXiv 2005.11401v4) that the benchmark looks for, in percent."""

from paper_verdicts import GOLD, NOTHING, Finding

SEQUENCE, TOKEN, CLOSED, SPANS = "RAG-Sequence", "RAG-Token", "closed book", "extractive"
LEARNED, FROZEN, WORDS = "learned", "frozen", "BM25"
QA, TEXT, CLUE, FACT, MADE, SWAP = "questions", "texts", "clues", "claims", "made world", "index swap"
FOUND, FACTS = "passages found", "changed passages"
FIRST, CROSSED = "first index, its facts", "second index, the first's facts"
SECOND, CROSSED_BACK = "second index, its facts", "first index, the second's facts"
HELD = "Success@k"  # of the first k passages one holds an answer

FINDINGS = (
    # Natural Questions; their closed book is T5-11B, a larger model of another kind, and extractive is DPR
    Finding("table 1", QA, "EM", SEQUENCE, CLOSED, (44.5, 34.5)),
    Finding("table 1", QA, "EM", TOKEN, CLOSED, (44.1, 34.5)),
    Finding("table 1", QA, "EM", SEQUENCE, TOKEN, (44.5, 44.1)),
    Finding("table 1", QA, "EM", SEQUENCE, SPANS, (44.5, 41.5)),
    Finding("table 1, by F1", QA, "F1", SEQUENCE, CLOSED),
    Finding("table 1, by F1", QA, "F1", TOKEN, CLOSED),
    Finding("table 6", QA, "EM", SEQUENCE, WORDS, (41.2, 31.8)),
    Finding("table 6, by F1", QA, "F1", SEQUENCE, WORDS),
    Finding("figure 3", FOUND, HELD, FROZEN, WORDS),
    Finding("section 4.5", FACTS, "EM", FIRST, CROSSED, (70.0, 12.0)),
    Finding("section 4.5", FACTS, "EM", SECOND, CROSSED_BACK, (68.0, 4.0)),
    Finding("section 4.5, by F1", FACTS, "F1", FIRST, CROSSED),
    Finding("section 4.5, by F1", FACTS, "F1", SECOND, CROSSED_BACK),
    Finding("section 4.1", QA, "EM-unheld", SEQUENCE, NOTHING, (11.8, 0.0)),
    # MS MARCO and Jeopardy; their closed book is BART
    Finding("table 2", TEXT, "ROUGE-L", SEQUENCE, CLOSED, (40.8, 38.2)),
    Finding("table 2", TEXT, "ROUGE-L", TOKEN, CLOSED, (40.1, 38.2)),
    Finding("table 2", TEXT, "BLEU-1", SEQUENCE, CLOSED, (44.2, 41.6)),
    Finding("table 2", CLUE, "Q-BLEU-1", TOKEN, CLOSED, (22.2, 19.7)),
    Finding("table 2", CLUE, "Q-BLEU-1", TOKEN, SEQUENCE, (22.2, 21.4)),
    Finding("table 2", CLUE, "BLEU-1", TOKEN, CLOSED, (17.3, 15.1)),
    Finding("table 2", CLUE, "BLEU-1", TOKEN, SEQUENCE, (17.3, 14.7)),
    Finding("table 5", TEXT, "distinct-3", SEQUENCE, CLOSED, (83.5, 70.7)),
    Finding("table 5", TEXT, "distinct-3", SEQUENCE, TOKEN, (83.5, 77.8)),
    Finding("table 5", CLUE, "distinct-3", TOKEN, CLOSED, (46.8, 32.4)),
    Finding("table 5", CLUE, "distinct-3", SEQUENCE, TOKEN, (53.8, 46.8)),
    Finding("table 5", CLUE, "distinct-3", GOLD, SEQUENCE, (90.0, 53.8)),
    # FEVER with two labels; their closed book is BART
    Finding("table 2", FACT, "Acc-2way", SEQUENCE, CLOSED, (89.5, 81.1)),
    Finding("table 6", FACT, "Acc-2way", WORDS, SEQUENCE, (91.6, 89.4)),
    # Natural Questions, RAG-Sequence, by retriever; then what the index holds
    Finding("table 6", MADE, "EM", LEARNED, FROZEN, (44.0, 41.2)),
    Finding("table 6", MADE, "EM", FROZEN, WORDS, (41.2, 31.8)),
    Finding("figure 3", MADE, HELD, LEARNED, FROZEN),
    Finding("figure 3", MADE, HELD, FROZEN, WORDS),
    Finding("table 6", MADE, "EM", LEARNED, CLOSED, (44.5, 34.5)),
    Finding("section 4.5", SWAP, "EM", FIRST, CROSSED, (70.0, 12.0)),
    Finding("section 4.5", SWAP, "EM", SECOND, CROSSED_BACK, (68.0, 4.0)),
    Finding("figure 3", MADE, "EM", "RAG-Sequence, most passages", "RAG-Sequence, 1 passage"),
    Finding("figure 3", MADE, "EM", "RAG-Token, most passages", "RAG-Token, 1 passage"),
)
