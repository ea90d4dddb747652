"""Measure decoding of RAG-Token and RAG-Sequence beside `generate` of transformers' RAG classes, at equal weights.

The generator is a BART of random weights, 3 + 3 layers of 256, with the real vocabulary of 50,265;
its answers have the maximum length. Contexts have equal lengths, since `RagSequenceForGeneration`
reads the padding of shorter ones. It decodes greedily and with four beams, RAG-Sequence thoroughly.
Both sides run in their own processes and take turns. Prints one JSON line a way of decoding: answer
tokens a second of both and their ratio, by CPU seconds, since wall seconds of a busy machine say
little; peak memory beyond the loaded model; and `same`, the share of equal answers (sums in another
order may choose the other of two answers that are almost equally likely).
`python tests/benchmarks/bench_rag_decode.py [--questions 2] [--rounds 3]` takes about two minutes.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DPRConfig,
    DPRQuestionEncoder,
    RagSequenceForGeneration,
    RagTokenForGeneration,
    set_seed,
)

from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.generator import Contexts
from rag_model.generate.prompts import PaperTemplate
from rag_model.generate.rag_decoding import decode_sequence, decode_token
from rag_model.generate.transformer import Seq2SeqGenerator

START, PAD, END = 2, 1, 2
Answers = list[list[int]]
Decode = Callable[[str, int], Answers]  # from kind and beams to answers


@dataclass(frozen=True, slots=True)
class Work:
    """The sizes that both sides decode."""

    questions: int
    k: int  # passages a question
    context: int  # tokens
    answer: int  # tokens, at most
    width: int
    layers: int  # of the encoder, and of the decoder
    vocabulary: int
    threads: int
    device: str

    def build_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw (b k, s) tokens and (b, k) scores on the device."""
        stream = torch.Generator().manual_seed(1)
        tokens = torch.randint(4, self.vocabulary, (self.questions * self.k, self.context), generator=stream)
        scores = torch.randn(self.questions, self.k, generator=stream).mul(2)
        return tokens.to(self.device), scores.to(self.device)


def build_bart(work: Work) -> BartForConditionalGeneration:
    """Return the generator, with the same weights in every process."""
    set_seed(0)
    config = BartConfig(
        vocab_size=work.vocabulary,
        d_model=work.width,
        encoder_layers=work.layers,
        decoder_layers=work.layers,
        encoder_attention_heads=work.width // 64,
        decoder_attention_heads=work.width // 64,
        encoder_ffn_dim=4 * work.width,
        decoder_ffn_dim=4 * work.width,
        max_position_embeddings=1024,
        init_std=0.06,  # the default .02 leaves random answers nearly equally likely
        decoder_start_token_id=START,
        forced_eos_token_id=None,
    )
    model: Any = BartForConditionalGeneration(config).eval()
    return model.to(work.device)


def load_ours(work: Work) -> Decode:
    generator = Seq2SeqGenerator(build_bart(work), None, END, frozenset({END}), PaperTemplate(), START, None, PAD, 1024)
    tokens, scores = work.build_inputs()
    contexts = Contexts(tokens, torch.ones_like(tokens, dtype=torch.bool), work.k)
    ways = {"token": decode_token, "sequence": decode_sequence}

    def run(kind: str, beams: int) -> Answers:
        settings = DecodingSettings(beams=beams, max_new_tokens=work.answer)
        answers = ways[kind](generator, contexts, scores.log_softmax(-1), settings, [0] * work.questions)
        return [list(answer.tokens) for answer in answers]

    return run


def load_peer(work: Work) -> Decode:
    shape: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    encoder = DPRQuestionEncoder(DPRConfig(vocab_size=8, hidden_size=8, **shape))
    parts = {"question_encoder": encoder, "generator": build_bart(work), "n_docs": work.k}
    ways: dict[str, Any] = {"token": RagTokenForGeneration(**parts), "sequence": RagSequenceForGeneration(**parts)}
    for way in ways.values():
        way.to(work.device)
    tokens, scores = work.build_inputs()

    def run(kind: str, beams: int) -> Answers:
        sequences = ways[kind].generate(
            context_input_ids=tokens,
            context_attention_mask=torch.ones_like(tokens),
            doc_scores=scores,
            num_beams=beams,
            max_length=work.answer + 1,  # with the start token
            suppress_tokens=[PAD],
            decoder_start_token_id=START,
            eos_token_id=END,
            pad_token_id=PAD,
            bos_token_id=None,
            **({"length_penalty": 0.0, "early_stopping": "never"} if beams > 1 else {}),
        )
        return [_truncate_at_end(answer[1:]) for answer in sequences.tolist()]

    return run


def _truncate_at_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


@dataclass(frozen=True, slots=True)
class DecodingRun:
    """Time, memory and answers of one decoding."""

    seconds: float
    cpu_seconds: float
    peak_mb: float  # beyond that of the loaded model
    answers: Answers

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


@dataclass(frozen=True, slots=True)
class DecoderProcess:
    """One of the two sides, in its own process."""

    pipe: Connection
    process: BaseProcess

    @classmethod
    def start(cls, load: Callable[[Work], Decode], work: Work) -> "DecoderProcess":
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, load, work), daemon=True)
        process.start()
        return cls(ours, process)

    def turn(self, kind: str, beams: int) -> DecodingRun:
        self.pipe.send((kind, beams))
        turn: DecodingRun = self.pipe.recv()
        return turn

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join()


def serve(pipe: Connection, load: Callable[[Work], Decode], work: Work) -> None:
    """Decode for each request from the pipe; send back the results."""
    torch.set_num_threads(work.threads)
    decode = load(work)
    loaded_mb = _read_status_mb("VmRSS")
    while (way := pipe.recv()) is not None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the memory
        start, cpu_start = time.perf_counter(), time.process_time()
        answers = decode(*way)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        pipe.send(DecodingRun(seconds, cpu, _read_status_mb("VmHWM") - loaded_mb, answers))


def _read_status_mb(field: str) -> float:
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024 / 1e6


def compare(sides: Sequence[DecoderProcess], kind: str, beams: int, rounds: int, clock: str) -> dict[str, Any]:
    """Decode with both sides in turns; return the report."""
    turns = [[side.turn(kind, beams) for side in sides] for _ in range(rounds + 1)][1:]  # the first is a warm-up
    mine, theirs = zip(*turns, strict=True)
    rates = [statistics.median(turn.tokens / getattr(turn, clock) for turn in side) for side in (mine, theirs)]
    answers = list(zip(mine[-1].answers, theirs[-1].answers, strict=True))
    return {
        "benchmark": "rag_decode",
        "kind": kind,
        "beams": beams,
        "answer_tokens": mine[-1].tokens,
        "ours_tokens_per_s": round(rates[0], 1),
        "peer_tokens_per_s": round(rates[1], 1),
        "ratio": round(rates[0] / rates[1], 2),
        "wall_ratio": round(statistics.median(their.seconds / my.seconds for my, their in turns), 2),
        "same": sum(our_answer == right for our_answer, right in answers) / len(answers),
        "ours_peak_mb": round(max(turn.peak_mb for turn in mine)),
        "peer_peak_mb": round(max(turn.peak_mb for turn in theirs)),
        "ours_cpu_s": [round(turn.cpu_seconds, 2) for turn in mine],
        "peer_cpu_s": [round(turn.cpu_seconds, 2) for turn in theirs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=2)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--context", type=int, default=96, help="tokens of a question with a passage")
    parser.add_argument("--answer", type=int, default=12, help="tokens of an answer")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=50265)
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="on a GPU, rates are by wall seconds")
    options = vars(parser.parse_args())
    beams, rounds = options.pop("beams"), options.pop("rounds")
    work = Work(**options)
    clock = "seconds" if work.device == "cuda" else "cpu_seconds"
    sides = [DecoderProcess.start(load, work) for load in (load_ours, load_peer)]
    for kind in ("token", "sequence"):
        for width in beams:
            print(json.dumps({**compare(sides, kind, width, rounds, clock), **asdict(work)}), flush=True)
    for side in sides:
        side.end()


if __name__ == "__main__":
    main()
