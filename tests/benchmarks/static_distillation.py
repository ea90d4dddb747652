"""A static encoder made from a transformer in a minute, for use without a trained one: model2vec's distillation.

Each token of the vocabulary is encoded alone; the vectors are reduced by PCA and weighted by the token's rank, which
follows its frequency (Tulkens and van Dongen 2024, "Model2Vec"). Published static encoders are
trained further, and are better.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from rag_model.encoders.encoder import Encoder

_UNUSED = re.compile(r"\[unused\d+\]")
_MODULES = [  # as published folders have them: sentence-transformers opens no other
    {"idx": 0, "name": "0", "path": ".", "type": "sentence_transformers.models.StaticEmbedding"},
    {"idx": 1, "name": "1", "path": "1_Normalize", "type": "sentence_transformers.models.Normalize"},
]
_FREQUENCY = 1e-4  # a of a / (a + p): smooth inverse frequency (Arora et al. 2017)


def write_static_encoder(encoder: Encoder, folder: Path, dim: int = 256) -> Path:
    """Write a static encoder's folder from the vectors of a transformer's tokens."""
    vocabulary = encoder.tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    words = [token.removeprefix("##") for token in tokens]
    table = np.zeros((len(tokens), encoder.dim), np.float32)
    used = [row for row, token in enumerate(tokens) if not _UNUSED.fullmatch(token)]
    table[used] = encoder.encode_questions([words[row] for row in used])
    rows = reduce_dimensions(table[used], dim)
    ranks = np.arange(2, len(rows) + 2)  # Zipf's law: the probability falls with the rank
    shares = 1 / ranks / (1 / ranks).sum()
    out = np.zeros((len(tokens), rows.shape[1]), np.float32)
    out[used] = rows * (_FREQUENCY / (_FREQUENCY + shares))[:, None]
    folder.mkdir(parents=True)
    save_file({"embeddings": out}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True}))
    (folder / "modules.json").write_text(json.dumps(_MODULES))
    shutil.copyfile(encoder.folder / "tokenizer.json", folder / "tokenizer.json")
    return folder


def reduce_dimensions(vectors: npt.NDArray[np.float32], dim: int) -> npt.NDArray[np.float32]:
    """Project (n, d) vectors on their first `dim` principal components; return (n, dim)."""
    centred = vectors - vectors.mean(axis=0)
    directions = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :dim]
    reduced_vectors: npt.NDArray[np.float32] = (centred @ directions).astype(np.float32)
    return reduced_vectors
