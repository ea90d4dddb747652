"""Measure a RAG training step beside transformers' `RagSequenceForGeneration` and `RagTokenForGeneration`.

A step is the question encoder, the generator, the marginal, backward and AdamW, over the same
weights and batch. The weights are random: a BART of 6 + 6 layers of 256 with the real vocabulary of
50,265 (`--layers 12 --dim 1024` is BART-large), and a DPR question encoder of 2 layers. There is no
dropout, so that equal steps have equal losses. Each side runs in its own process, in turns. Prints
one JSON line: tokens a second of both and their ratio, by CPU seconds, since wall seconds of a busy
machine say little; peak anonymous memory and its ratio; and the largest relative difference of the
losses. `--device cuda` computes on a GPU, where wall seconds count (`ours_tokens_per_s`);
`--precision` is that of the products: no (float32), tf32 or bf16.
`python tests/benchmarks/bench_rag_step.py [--smoothing 0 .1] [--rounds 3]` takes about two minutes.
"""

import argparse
import json
import statistics
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import step_timing
import torch
from isolated_run import WorkCost, run_alone
from step_timing import Step
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    DPRConfig,
    DPRQuestionEncoder,
    RagConfig,
    RagSequenceForGeneration,
    RagTokenForGeneration,
    set_seed,
)

from rag_model.encoders.trainable import TrainableEncoder
from rag_model.generate.generator import Contexts, Targets
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag, RagSettings, Variant

K, CONTEXT, TARGET, WORDS = 5, 96, 16, 50_265
HEAD_DIM = 64
PEERS = {"sequence": RagSequenceForGeneration, "token": RagTokenForGeneration}


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings of both sides of a comparison."""

    kind: str  # sequence or token
    smoothing: float
    steps: int
    questions: int
    device: str
    precision: str

    @property
    def texts(self) -> list[str]:
        """The questions, made of the tokenizer's numbered words."""
        return [f"w{number} w{number + 1} w{number + 2} w{number + 3}" for number in range(self.questions)]

    def build_batch(self, dim: int) -> tuple[Tensor, Contexts, Targets]:
        """Return passages' vectors (questions, K, dim), contexts and targets of uneven lengths, padded."""
        source = torch.Generator().manual_seed(2)
        vectors = torch.randn(self.questions, K, dim, generator=source)
        tokens = torch.randint(4, WORDS, (self.questions * K, CONTEXT), generator=source)
        lengths = torch.randint(CONTEXT // 2, CONTEXT + 1, (self.questions * K, 1), generator=source)
        mask = torch.arange(CONTEXT) < lengths
        labels = torch.randint(4, WORDS, (self.questions, TARGET), generator=source)
        label_lengths = torch.tensor([[TARGET], *[[TARGET // 2]] * (self.questions - 1)])
        label_mask = torch.arange(TARGET) < label_lengths
        labels = labels.masked_fill(torch.arange(TARGET) == label_lengths - 1, 2).masked_fill(~label_mask, 1)
        contexts = Contexts(tokens.masked_fill(~mask, 1).to(self.device), mask.to(self.device), K)
        return vectors.to(self.device), contexts, Targets(labels.to(self.device), label_mask.to(self.device))


def write_models(folder: Path, layers: int, dim: int) -> None:
    """Write both models, with a tokenizer of numbered words."""
    set_seed(1)
    heads = max(dim // HEAD_DIM, 1)
    sizes = {"d_model": dim, "encoder_ffn_dim": 4 * dim, "decoder_ffn_dim": 4 * dim, "vocab_size": WORDS}
    shape = {
        f"{part}_{size}": count
        for part in ("encoder", "decoder")
        for size, count in (("layers", layers), ("attention_heads", heads))
    }
    BartForConditionalGeneration(BartConfig(**sizes, **shape, dropout=0.0)).save_pretrained(folder / "generator")
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    small = {"vocab_size": WORDS, "hidden_size": dim, "num_hidden_layers": 2, "num_attention_heads": heads}
    DPRQuestionEncoder(DPRConfig(**small, intermediate_size=4 * dim, **off)).save_pretrained(folder / "question")
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3} | {f"w{number}": number for number in range(4, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    for name in ("generator", "question"):
        tokenizer.save(str(folder / name / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        (folder / name / "tokenizer_config.json").write_text(json.dumps(settings))


def in_precision(device: str, precision: str) -> AbstractContextManager[object]:
    """Set the precision of float32 products, and return the context of a forward pass."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    return torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext()


def ours(folder: Path, settings: StepSettings) -> list[Step]:
    """Train with bookwheel."""
    question = TrainableEncoder.load(folder / "question", "question", device=settings.device)
    generator = load_generator(folder / "generator", device=settings.device, dtype="float32")
    variant: Variant = "sequence" if settings.kind == "sequence" else "token"
    marginal = RagSettings(variant, K, label_smoothing=settings.smoothing)
    rag = Rag(question, generator, marginal).train()
    vectors, contexts, targets = settings.build_batch(question.dim)
    forward = in_precision(settings.device, settings.precision)

    def loss(_: int) -> Tensor:
        with forward:
            scores = torch.einsum("bd,bkd->bk", rag.embed_questions(settings.texts).float(), vectors)
            return rag.loss(scores, contexts, targets).sum()

    return step_timing.take_our_steps(rag, loss, settings.steps, 1e-5, settings.device)


def theirs(folder: Path, settings: StepSettings) -> list[Step]:
    """Train with transformers' RAG class."""
    question = DPRQuestionEncoder.from_pretrained(folder / "question")
    generator = AutoModelForSeq2SeqLM.from_pretrained(folder / "generator")
    config = RagConfig.from_question_encoder_generator_configs(
        question.config, generator.config, n_docs=K, label_smoothing=settings.smoothing, reduce_loss=True
    )
    rag = PEERS[settings.kind](config, question, generator).train().to(settings.device)
    tokenizer = Tokenizer.from_file(str(folder / "question" / "tokenizer.json"))
    question_ids = torch.tensor([row.ids for row in tokenizer.encode_batch(settings.texts)], device=settings.device)
    vectors, contexts, targets = settings.build_batch(question.config.hidden_size)
    starts = torch.full((settings.questions, 1), 2, device=settings.device)
    labels = torch.cat([starts, targets.tokens], 1)
    mask = contexts.mask.long()
    forward = in_precision(settings.device, settings.precision)

    def loss(_: int) -> Tensor:
        with forward:
            scores = torch.einsum("bd,bkd->bk", rag.question_encoder(question_ids).pooler_output.float(), vectors)
            inputs = {"context_input_ids": contexts.tokens, "context_attention_mask": mask, "doc_scores": scores}
            result: Tensor = rag(**inputs, labels=labels).loss
            return result

    return step_timing.take_plain_steps(rag, loss, settings.steps, 1e-5)


def compare(folder: Path, settings: StepSettings, rounds: int, threads: int) -> dict[str, object]:
    """Run both sides in turns and compare them; the first step of each process is a warm-up."""
    runs: dict[str, list[WorkCost]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        for side in (ours, theirs):
            runs[side.__name__].append(run_alone(side, folder, settings, threads=threads))
    cpu = {name: step_timing.median(costs, "cpu_seconds") for name, costs in runs.items()}
    wall = {name: step_timing.median(costs, "seconds") for name, costs in runs.items()}
    peak = {name: statistics.median(run.anonymous_mb for run in costs) for name, costs in runs.items()}
    losses = [[step.loss for step in run[0].value] for run in runs.values()]
    tokens = settings.questions * K * (CONTEXT + TARGET)
    return {
        "ratio": round(cpu["theirs"] / cpu["ours"], 3),
        "wall_ratio": round(wall["theirs"] / wall["ours"], 3),
        "memory_ratio": round(peak["ours"] / peak["theirs"], 3),
        "ours_tokens_per_s": round(tokens / wall["ours"]),
        "theirs_tokens_per_s": round(tokens / wall["theirs"]),
        "ours_tokens_per_cpu_s": round(tokens / cpu["ours"]),
        "theirs_tokens_per_cpu_s": round(tokens / cpu["theirs"]),
        "ours_peak_mb": round(peak["ours"]),
        "theirs_peak_mb": round(peak["theirs"]),
        "loss": [round(loss, 3) for loss in losses[0]],
        "largest_loss_difference": max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--smoothing", nargs="+", type=float, default=[0.0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=6, help="layers of the generator's encoder, and of its decoder")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("no", "tf32", "bf16"), default="no")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as workdir:
        write_models(Path(workdir), options.layers, options.dim)
        results = {
            f"{kind} smoothing {smoothing}": compare(
                Path(workdir),
                StepSettings(kind, smoothing, options.steps + 1, options.questions, options.device, options.precision),
                options.rounds,
                options.threads,
            )
            for kind in options.kind
            for smoothing in options.smoothing
        }
    sizes = {"passages": K, "context": CONTEXT, "target": TARGET, "vocabulary": WORDS}
    sizes |= {name: getattr(options, name) for name in ("questions", "layers", "dim", "threads")}
    report = {"device": options.device, "precision": options.precision, "results": results}
    print(json.dumps({"benchmark": "rag_step", **sizes, **report}))


if __name__ == "__main__":
    main()
