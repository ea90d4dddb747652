"""Folders of tiny encoders in several layouts, and texts to encode."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DPRConfig, DPRContextEncoder, DPRQuestionEncoder

from tests.fixtures.tiny import SHAPE, WORDS, add_tokenizer, save_bert, write_json

Build = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain Hugging Face folder."""
    return save_bert(tmp_path_factory.mktemp("tiny-bert"))


@pytest.fixture(scope="session")
def tiny_dpr(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a passage and a question encoder of DPR."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(2)
    for kind, name in ((DPRContextEncoder, "dpr-ctx_encoder"), (DPRQuestionEncoder, "dpr-question_encoder")):
        kind(DPRConfig(**SHAPE)).save_pretrained(folder / name)
        add_tokenizer(folder / name)
    return folder / "dpr-ctx_encoder", folder / "dpr-question_encoder"


@pytest.fixture
def tiny_st(tiny_bert: Path, tmp_path: Path) -> Build:
    """Return a function that writes a sentence-transformers folder with the tiny BERT."""

    def build(name: str = "st", *, pooling: Any = None, modules: Any = None, prompts: Any = None) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for path in tiny_bert.iterdir():
            (folder / path.name).symlink_to(path)
        kinds = modules or ["Transformer", "Pooling", "Normalize"]
        paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds) if number)]
        entries = [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (kind, path) in enumerate(zip(kinds, paths, strict=True))
        ]
        write_json(folder / "modules.json", entries)
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": False})
        default = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
        write_json(folder / "1_Pooling" / "config.json", default if pooling is None else pooling)
        write_json(folder / "config_sentence_transformers.json", prompts or {})
        return folder

    return build


@pytest.fixture(scope="session")
def texts() -> tuple[list[str], list[str]]:
    """Titles, some of which are empty, and texts of very different lengths."""
    titles = ["", "the king", "a", "Music theory", "the city of rivers", "x"] * 5
    return titles, [" ".join(WORDS[: 1 + (7 * i) % 20]) + "." for i in range(len(titles))]
