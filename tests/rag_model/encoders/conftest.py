"""Tiny real encoders, built on the spot: one random layer, 32 dimensions, letters and a few words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.implementations import BertWordPieceTokenizer
from transformers import BertConfig, BertModel, DPRConfig, DPRContextEncoder, DPRQuestionEncoder

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:?!'-"
WORDS = [
    "the",
    "of",
    "and",
    "a",
    "in",
    "to",
    "is",
    "was",
    "were",
    "query",
    "passage",
    "who",
    "wrote",
    "born",
    "city",
    "river",
    "king",
    "music",
    "war",
    "theory",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = list(dict.fromkeys([*SPECIAL, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]))
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # the default .02 leaves random vectors nearly equal
}
Build = Callable[..., Path]


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def add_tokenizer(folder: Path) -> None:
    vocabulary = {token: number for number, token in enumerate(VOCABULARY)}
    BertWordPieceTokenizer(vocabulary, lowercase=True).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 64}
    write_json(folder / "tokenizer_config.json", settings)


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tiny-bert")
    torch.manual_seed(1)
    BertModel(BertConfig(**SHAPE), add_pooling_layer=False).save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_dpr(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """DPR's pair: the folders of the passage and the question encoder."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(2)
    for kind, name in ((DPRContextEncoder, "dpr-ctx_encoder"), (DPRQuestionEncoder, "dpr-question_encoder")):
        kind(DPRConfig(**SHAPE)).save_pretrained(folder / name)
        add_tokenizer(folder / name)
    return folder / "dpr-ctx_encoder", folder / "dpr-question_encoder"


@pytest.fixture
def tiny_st(tiny_bert: Path, tmp_path: Path) -> Build:
    """Build a sentence-transformers folder around the tiny BERT."""

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
    """Titles and texts of very different lengths, an empty title among them."""
    titles = ["", "the king", "a", "Music theory", "the city of rivers", "x"] * 5
    return titles, [" ".join(WORDS[: 1 + (7 * i) % 20]) + "." for i in range(len(titles))]
