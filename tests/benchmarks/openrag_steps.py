"""A training step of OpenRAG: ours, and a plain loop of the same equations in torch and transformers.

Both encoders are initialised from MiniLM; the generator that judges is a BART of 3 + 3 layers of 256 with random
weights and MiniLM's wordpieces. A passage helps with a probability of about 1/2, because the bounds of a question are
the median of the scores of some passages. Both sides use the same questions and draws, read one passage after the other
until the first that does not help, and step AdamW. There is no dropout, so losses are equal.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_openrag import Proposals, by_bags
from step_timing import Loss
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, BartConfig, BartForConditionalGeneration

from flows.demo import demo_encoder
from rag_model.corpus.records import Passage
from rag_model.encoders.bag import compute_term_mask
from rag_model.encoders.tokens import load_tokenizer, pad_rows, tokenize
from rag_model.evaluation.bootstrap import estimate_mean
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import PaperTemplate
from rag_model.training.data.batches import DprBatch
from rag_model.training.data.examples import Example
from rag_model.training.data.judging import ExamplePools, JudgeSettings, PassageJudge, PooledExample, judge_passages
from rag_model.training.objectives.openrag import OnlineJudging, OpenRagRecipe, OpenRagTask
from rag_model.training.objectives.sidr import SidrPair

LENGTHS, KEPT, AT_ONCE, POOL = (128, 256), 768, 64, 4
FORM = PaperTemplate()


@dataclass(frozen=True, slots=True)
class TrainingInputs:
    """The inputs that both sides train on."""

    reader: Path
    corpus: list[Passage]
    pools: list[PooledExample]
    batches: list[DprBatch]  # with passages that are drawn from the pools
    proposed: int  # passages per question that are retrieved and judged online; 0: none


def prepare(
    folder: Path, corpus: list[Passage], question_answers: Sequence[tuple[str, str]], questions: int, steps: int
) -> TrainingInputs:
    """Write the generator, and make pools and batches of questions with their answers."""
    write_reader(folder / "reader")
    examples = [
        Example(str(number), *question_and_answers, (), ())
        for number, question_and_answers in enumerate((q, (a,)) for q, a in question_answers)
    ]
    judge = PassageJudge(
        load_generator(folder / "reader", FORM, device="cpu"), examples, JudgeSettings(max_new_tokens=1)
    )
    dice = np.random.default_rng(0)
    pools = list[PooledExample]()
    for example in examples:
        passages = [corpus[row] for row in dice.permutation(len(corpus))[: 2 * POOL]]
        scores = sorted(judgement.log_p for judgement in judge_passages(judge, example.question, passages))
        middle = (scores[POOL - 1] + scores[POOL]) / 2
        pool_fields = example.id, example.question, example.answers, tuple(passages[:POOL]), tuple(passages[POOL:])
        pools.append(PooledExample(*pool_fields, best_negative_log_p=middle, worst_positive_log_p=middle))
    pool_inputs = TrainingInputs(folder / "reader", corpus, pools, [], 0)
    task = task_of(pool_inputs, SidrPair.load(*[Path(demo_encoder())] * 2, device="cpu"), None, questions, online=False)
    return TrainingInputs(folder / "reader", corpus, pools, list(task.batches(0)[:steps]), 0)


def write_reader(folder: Path) -> None:
    """Write a BART with random weights and MiniLM's tokenizer."""
    torch.manual_seed(1)
    sizes = {"d_model": 256, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024, "vocab_size": 30_522, "dropout": 0.0}
    sizes |= {
        f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 3), ("attention_heads", 4))
    }
    special = {"bos_token_id": 101, "pad_token_id": 0, "eos_token_id": 102, "decoder_start_token_id": 102}
    BartForConditionalGeneration(BartConfig(**sizes, **special, forced_eos_token_id=None)).save_pretrained(folder)
    shutil.copy(Path(demo_encoder()) / "tokenizer.json", folder)
    names = {"bos_token": "[CLS]", "eos_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))


def task_of(
    inputs: TrainingInputs, pair: SidrPair, asking: OnlineJudging | None, size: int, **settings: Any
) -> OpenRagTask:
    """Return the training task of the pools."""
    pools = ExamplePools(tuple(inputs.pools), 0, 0, estimate_mean([1.0]))
    return OpenRagTask(pair, pools, inputs.pools[:1], OpenRagRecipe(batch_size=size, **settings), asking)  # type: ignore[arg-type]


def ours(inputs: TrainingInputs) -> tuple[nn.Module, Loss]:
    """Return the modules, and the loss of a step, as this library trains."""
    pair = without_dropout(SidrPair.load(*[Path(demo_encoder())] * 2, device="cpu").train())
    asking, size = None, len(inputs.batches[0].examples)
    if inputs.proposed:
        with tempfile.TemporaryDirectory() as work:
            memory = Proposals(inputs.corpus, by_bags(pair, inputs.corpus, Path(work)), terms=KEPT)
        settings = JudgeSettings()
        judge = PassageJudge(
            load_generator(inputs.reader, FORM, device="cpu"), inputs.pools, settings, generates_answers=False
        )
        asking = OnlineJudging(memory, judge, judge, settings)  # type: ignore[arg-type]
    online_settings = {"online": bool(inputs.proposed), "proposed": max(1, inputs.proposed)}
    task = task_of(inputs, pair, asking, size, **online_settings)
    return pair, lambda number: task.loss(inputs.batches[number])[0]


def plain(inputs: TrainingInputs) -> tuple[nn.Module, Loss]:
    """Return the modules of a plain loop, and its loss of a step."""
    folder = Path(demo_encoder())
    bodies = nn.ModuleList([AutoModel.from_pretrained(str(folder), add_pooling_layer=False) for _ in range(2)])
    norms = nn.ModuleList([nn.LayerNorm(body.config.hidden_size) for body in bodies])
    model, size = without_dropout(nn.ModuleList([bodies, norms]).train()), bodies[0].config.vocab_size
    tokenizers = [load_tokenizer(folder, length) for length in LENGTHS]
    terms = torch.from_numpy(compute_term_mask(tokenizers[0], size))
    find = plain_search(inputs, tokenizers[1], terms) if inputs.proposed else None
    judge = plain_judge(inputs.reader) if inputs.proposed else None

    def weigh(side: int, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        rows = tokenize(tokenizers[side], texts)
        ids, real = (torch.from_numpy(part) for part in pad_rows(rows, max(map(len, rows)), 0))
        hidden = norms[side](bodies[side](input_ids=ids, attention_mask=real.long())[0])
        products = nn.functional.elu(hidden @ bodies[side].embeddings.word_embeddings.weight.T) + 1  # (b, t, V)
        weights = products.masked_fill(~real[..., None], 0).max(1)[0] * terms
        return weights, torch.zeros(len(ids), size).scatter(1, ids, 1) * terms

    @torch.no_grad()
    def scan_online(questions: Sequence[PooledExample]) -> list[tuple[Passage | None, Passage | None]]:
        query_weights = keep_heaviest(*weigh(0, [question.question for question in questions]))
        candidate_rows = find(query_weights)  # type: ignore[misc]
        distinct_rows = sorted({row for rows in candidate_rows for row in rows})
        read = torch.cat(
            [
                keep_heaviest(
                    *weigh(1, [format_passage(inputs.corpus[row]) for row in distinct_rows[first : first + AT_ONCE]])
                )
                for first in range(0, len(distinct_rows), AT_ONCE)
            ]
        )
        scores = query_weights @ read.T
        best = [
            sorted(rows, key=lambda row, number=question_number: -float(scores[number, distinct_rows.index(row)]))
            for question_number, rows in enumerate(candidate_rows)
        ]  # type: ignore[misc]
        return [
            scan(question, [inputs.corpus[row] for row in rows], judge)
            for question, rows in zip(questions, best, strict=True)
        ]

    def loss(number: int) -> Tensor:
        batch = inputs.batches[number]
        passage_pairs = [(example.positives[0], example.negatives[0]) for example in batch.examples]
        if inputs.proposed:
            online_pairs = scan_online(batch.examples)  # type: ignore[arg-type]
            passage_pairs = [(a or c, b or d) for (a, b), (c, d) in zip(online_pairs, passage_pairs, strict=True)]
        passages = list(
            dict.fromkeys([*(positive for positive, _ in passage_pairs), *(negative for _, negative in passage_pairs)])
        )
        gold = torch.tensor([passages.index(positive) for positive, _ in passage_pairs])
        is_positive = [
            [passage in (mine, *example.positives) for passage in passages]
            for example, (mine, _) in zip(batch.examples, passage_pairs, strict=True)
        ]
        ignored = torch.tensor(is_positive).scatter(1, gold[:, None], False)
        read, read_bag = weigh(1, [format_passage(passage) for passage in passages])
        query_weights, question_bag = weigh(0, [example.question for example in batch.examples])
        pairs = (
            (keep_heaviest(query_weights, question_bag), read),
            (query_weights, keep_heaviest(read, read_bag)),
            (question_bag, read),
            (query_weights, read_bag),
        )
        return torch.stack(
            [info_nce(query_side @ passage_side.T, gold, ignored) for query_side, passage_side in pairs]
        ).mean()

    return model, loss


def scan(example: PooledExample, ranked: Sequence[Passage], judge: Any) -> tuple[Passage | None, Passage | None]:
    """Return the first passage that helps, and the first that does not, which ends the scan; None if there is none."""
    positive = None
    for passage in ranked:
        known_label = passage in example.positives or (False if passage in example.negatives else None)
        score = judge(example.question, example.answers[0], passage) if known_label is None else 0.0
        above, below = score > example.best_negative_log_p, score < example.worst_positive_log_p
        helps = known_label if known_label is not None else (None if above == below else above)
        if helps is False:
            return positive, passage
        positive = positive or (passage if helps else None)
    return positive, None


def plain_search(inputs: TrainingInputs, tokenizer: Any, terms: Tensor) -> Callable[[Tensor], list[list[int]]]:
    """Return a search of the bags of all passages by a sparse product."""
    bags = torch.zeros(len(inputs.corpus), len(terms))
    for row, ids in enumerate(tokenize(tokenizer, [format_passage(passage) for passage in inputs.corpus])):
        bags[row, torch.tensor(ids)] = 1
    sparse = (bags * terms).to_sparse_csr()
    return lambda query_weights: (sparse @ mask_to_heaviest(query_weights).T).T.topk(inputs.proposed).indices.tolist()


def plain_judge(folder: Path) -> Callable[[str, str, Passage], float]:
    """Return a function that computes log p of an answer, given a question and a passage."""
    reader = AutoModelForSeq2SeqLM.from_pretrained(folder).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def judge(question: str, answer: str, passage: Passage) -> float:
        context = f"{passage.title} / {passage.text} // {question}".replace("  ", " ")
        read = tokenizer(context, truncation=True, max_length=FORM.max_length, return_tensors="pt")
        answer_ids = tokenizer(answer, return_tensors="pt")["input_ids"]
        decoder_ids = torch.cat([torch.full((1, 1), 102), answer_ids[:, :-1]], 1)
        ids, mask = read["input_ids"], read["attention_mask"]
        logits = reader(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids, use_cache=False).logits
        return float(logits.log_softmax(-1).gather(-1, answer_ids[..., None]).sum())

    return judge


def mask_to_heaviest(weights: Tensor) -> Tensor:
    """Set all but the `KEPT` largest weights of each row to 0."""
    return torch.zeros_like(weights).scatter(1, weights.topk(KEPT, 1).indices, 1) * weights


def keep_heaviest(weights: Tensor, bag: Tensor) -> Tensor:
    """Set all weights of each row to 0 except for the `KEPT` largest and those of the bag's terms."""
    mask = torch.zeros_like(weights).scatter(1, weights.detach().topk(KEPT, 1).indices, 1)
    return weights * torch.logical_or(mask, bag)


def info_nce(scores: Tensor, gold: Tensor, ignored: Tensor) -> Tensor:
    """Return the contrastive loss of both directions, without the ignored passages as negatives."""
    entropy, count = nn.functional.cross_entropy, len(gold)
    is_shared = (gold[:, None] == gold) & ~torch.eye(count, dtype=torch.bool)
    back = scores[:, gold].T.masked_fill(ignored[:, gold].T | is_shared, -torch.inf)
    return entropy(scores.masked_fill(ignored, -torch.inf), gold) + entropy(back, torch.arange(count))


def format_passage(passage: Passage) -> str:
    return f"{passage.title} {passage.text}" if passage.title else passage.text


def without_dropout(model: Any) -> Any:
    """Set every dropout to 0, and return the model."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model
