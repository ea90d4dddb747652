"""Measure embedding on a GPU: passages a second, and the share of the matrix-multiply rate of the same run.

Needs only torch, transformers and numpy: a BERT-base of random weights, and passages of random
tokens with the lengths of real 100-word passages. It runs production's path from ids to vectors;
transformers' class encodes the first window beside it. On a CPU it uses a tiny model, as a test.
FLOPs are counted on real tokens, without padding. `from_text_per_s` is the rate of encoding as many
texts with a tokenizer, whose work overlaps with that of the GPU; `overlap` is this rate over the
rate from ids, and 1 if tokenising costs nothing. Prints one JSON line. From the repository's root:
`python -m tests.benchmarks.bench_embedding_gpu [--windows 4]`.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import BertConfig, BertModel

from rag_model.encoders.encoder import Encoder
from rag_model.encoders.model import (
    Model,
    choose_fastest_dtype,
    choose_process_device,
    load_model,
    wrap_transformers_model,
)
from rag_model.encoders.spec import EncoderSpec
from rag_model.encoders.tokens import TokenIds

WIKIPEDIA = 21_015_324  # passages of DPR's psgs_w100.tsv
DPR_RATE = 83  # passages a second and GPU, of DPR's release
# Quantiles of the WordPiece tokens of 48,286 real passages of 100 words, title and special tokens included.
SHARES = [0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1]
LENGTHS = [102, 106, 110, 113, 121, 128, 137, 147, 155, 174, 256]
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}


def sample_passages(count: int, vocabulary: int, seed: int) -> list[TokenIds]:
    """Return random token ids, with the lengths of real passages."""
    random = np.random.default_rng(seed)
    lengths = np.interp(random.random(count), SHARES, LENGTHS).astype(int)
    return [random.integers(1000, vocabulary, length, dtype=np.int32) for length in lengths]


def count_flops(lengths: list[int], config: BertConfig) -> float:
    """Count the multiplications and additions in the matrix products of inputs of `lengths` tokens.

    A layer's four projections and two feed-forward products take 2 T (4 d^2 + 2 d f), attention's two
    products 4 T^2 d; embeddings, softmax, GELU and norms are not counted.
    """
    tokens = np.asarray(lengths, np.float64)
    wide = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    layer = 2 * tokens * wide + 4 * tokens**2 * config.hidden_size
    return float(config.num_hidden_layers * layer.sum())


def measure_matmul_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Measure the FLOP/s of a product of two square matrices, as the best of five rounds of ten."""
    first, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        wait(device)
        start = time.perf_counter()
        for _ in range(10):
            torch.matmul(first, right)
        wait(device)
        best = min(best, (time.perf_counter() - start) / 10)
    return 2 * size**3 / best


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_encoding(model: Model, tokens: list[TokenIds]) -> float:
    wait(model.device)
    start = time.perf_counter()
    vectors = model.encode(tokens, batch_invariant=True)  # like the stage `embed`
    seconds = time.perf_counter() - start
    if vectors.shape != (len(tokens), model.dim) or not np.isfinite(vectors).all():
        raise SystemExit("the vectors are not finite")
    return seconds


def measure_text_rate(words: int, model: Model, lengths: list[int]) -> float:
    """Measure the texts a second of an encoder with its tokenizer; each word is one token."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{f"w{number}": number for number in range(2, words)}}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    random = np.random.default_rng(0)
    texts = [" ".join(f"w{word}" for word in random.integers(2, words, length)) for length in lengths]
    encoder = Encoder("random", Path(), model.spec, tokenizer, model)
    encoder.encode_questions(texts[: len(texts) // 8])  # warm-up
    wait(model.device)
    start = time.perf_counter()
    encoder.encode_questions(texts)
    return len(texts) / (time.perf_counter() - start)


def main() -> None:
    device = torch.device(choose_process_device())
    on_gpu = device.type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=32_768 if on_gpu else 128, help="passages of a window")
    parser.add_argument("--windows", type=int, default=4 if on_gpu else 3)
    parser.add_argument("--batch-tokens", type=int, help="tokens of a batch; default: production's")
    parser.add_argument("--no-cudnn", action="store_true", help="use torch's attention, without plans for shapes")
    options = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(not options.no_cudnn)  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    config = BertConfig() if on_gpu else BertConfig(**TINY)
    body = BertModel(config, add_pooling_layer=False).to(choose_fastest_dtype(device))
    spec = EncoderSpec(pooling="cls", normalize=False)
    with tempfile.TemporaryDirectory() as folder:
        body.save_pretrained(folder)
        model = load_model(Path(folder), spec, str(device))
    model = dataclasses.replace(model, batch_tokens=options.batch_tokens or model.batch_tokens)
    time_encoding(model, sample_passages(options.passages, config.vocab_size, seed=0))  # warm-up
    windows = [sample_passages(options.passages, config.vocab_size, seed) for seed in range(1, options.windows + 1)]
    lengths = [len(ids) for ids in windows[0]]
    matmul_flops = measure_matmul_rate(device, model.dtype, 8192 if on_gpu else 512)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [time_encoding(model, window) for window in windows]
    rate = options.passages / statistics.median(seconds)
    # An encoder tokenises the next window while the device works, so this needs several windows.
    from_text = measure_text_rate(config.vocab_size, model, [len(ids) for window in windows for ids in window])
    peer = dataclasses.replace(wrap_transformers_model(body, spec, device), batch_tokens=model.batch_tokens)
    time_encoding(peer, windows[0][: options.passages // 4])  # warm-up
    peer_rate = options.passages / time_encoding(peer, windows[0])
    work = count_flops([len(ids) for window in windows for ids in window], config) / len(windows) / options.passages
    report = {
        "benchmark": "embedding_gpu",
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu (tiny model)",
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "batch_tokens": model.batch_tokens,
        "mean_tokens": round(statistics.mean(lengths), 1),
        "passages_per_s": round(rate, 1),
        "transformers_per_s": round(peer_rate, 1),
        "from_text_per_s": round(from_text, 1),
        "overlap": round(from_text / rate, 3),
        "torch": torch.__version__,
        "gpu": device.index if on_gpu else None,
        "times_dpr": round(rate / DPR_RATE, 1),
        "tflops": round(rate * work / 1e12, 3),
        "matmul_tflops": round(matmul_flops / 1e12, 3),
        "share_of_matmul": round(rate * work / matmul_flops, 3),
        "hours_for_wikipedia": round(WIKIPEDIA / rate / 3600, 2),
        "peak_gpu_mb": torch.cuda.max_memory_allocated(device) >> 20 if on_gpu else 0,
        "seconds": [round(value, 3) for value in seconds],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
