"""A static encoder without any training: MiniLM's tokenizer, and a random vector for each token.

Texts with the same words are near each other, so cells and graphs behave as with a trained encoder; its results are
meaningless. The vectors are weighted by the rank of the token, as model2vec does (`static_distillation.py`).
"""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

_FREQUENCY = 1e-4  # a of a / (a + p): smooth inverse frequency (Arora et al. 2017)


def made_static(tokenizer: Path, folder: Path, dim: int = 64, seed: int = 1) -> Path:
    """Write a model2vec folder for the vocabulary of a `tokenizer.json`; return it."""
    size = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    ranks = np.arange(2, size + 2)  # Zipf's law: the probability falls with the rank
    shares = 1 / ranks / (1 / ranks).sum()
    rows = np.random.default_rng(seed).normal(size=(size, dim)) * (_FREQUENCY / (_FREQUENCY + shares))[:, None]
    folder.mkdir(parents=True)
    save_file({"embeddings": rows.astype(np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True}))
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return folder
