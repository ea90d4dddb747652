"""The parts of a model, found by its files: they decide what the model can do, whichever training made it.

A part is a folder that `from_pretrained` opens: `question/`, `passage/`, `generator/`,
`cross-encoder/`, `colbert/`, `masked-lm/`, or one that a training defines.
transformers keeps a RAG model's question encoder and generator in one file; there each has a folder for its tokenizer.
"""

from collections.abc import Iterable

QUESTION, PASSAGE, GENERATOR = "question", "passage", "generator"
CROSS_ENCODER, COLBERT, MASKED_LM = "cross-encoder", "colbert", "masked-lm"
_HALVES = {"question_encoder_tokenizer": QUESTION, "generator_tokenizer": GENERATOR}


def parts_of(paths: Iterable[str]) -> frozenset[str]:
    """Return the names of the parts that files with these relative paths belong to; files at the top belong to none."""
    folders = {path.partition("/")[0] for path in paths if "/" in path}
    return frozenset(_HALVES.get(folder, folder) for folder in folders)
