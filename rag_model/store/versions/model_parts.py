"""The parts of a model, told by its files: what a model can do follows from them, whichever training made it.

A part is a folder that `from_pretrained` opens: `question/`, `passage/`, `generator/`, or one of a training's own.
transformers keeps a RAG model's question encoder and generator in one file; there each half has a tokenizer's folder.
"""

from collections.abc import Iterable

QUESTION, PASSAGE, GENERATOR = "question", "passage", "generator"
_HALVES = {"question_encoder_tokenizer": QUESTION, "generator_tokenizer": GENERATOR}


def parts_of(paths: Iterable[str]) -> frozenset[str]:
    """Return the names of the parts that files with these relative paths belong to; files at the top have none."""
    folders = {path.partition("/")[0] for path in paths if "/" in path}
    return frozenset(_HALVES.get(folder, folder) for folder in folders)
