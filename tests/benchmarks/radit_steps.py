"""A training step of each stage of RA-DIT: ours, and a plain loop of the same equations in torch and transformers.

Weights are random and without dropout, so that both sides have equal losses: a Llama of 6 layers of 256 with 49,152
words, a BERT of MiniLM's size. Both sides read the same texts, tokenise them at each step, and step AdamW.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import step_timing
import torch
from step_timing import Loss, Step
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from flows.import_library import import_library
from rag_model.encoders.encoder import Encoder
from rag_model.evaluation.gate import GateRecipe
from rag_model.index.recipe import IndexRecipe
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example
from rag_model.training.objectives.objective import Job
from rag_model.training.objectives.ra_dit import RA_DIT
from rag_model.training.objectives.ra_dit_tasks import LmRecipe, RaDitRecipe, RaDitTraining, RetrieverRecipe
from rag_model.training.origins import InitialModels

WORDS, PASSAGES, K, B_LM, B_RETRIEVER, ANSWER = 49_152, 64, 10, 2, 32, 6
TEMPERATURE, TAU, RATE = 0.05, 0.1, 1e-4


def prepare(folder: Path) -> None:
    """Write the models, and a store with a snapshot."""
    torch.manual_seed(1)
    llama = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )
    LlamaForCausalLM(llama).save_pretrained(folder / "generator")
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    BertModel(BertConfig(vocab_size=WORDS, **shape, **off), add_pooling_layer=False).save_pretrained(folder / "encoder")
    _write_tokenizer(folder / "generator", bert=False)
    _write_tokenizer(folder / "encoder", bert=True)
    texts = [" ".join(_word(97 * number + position) for position in range(100)) for number in range(PASSAGES)]
    rows = [{"id": f"p{number}", "title": _word(number), "text": text} for number, text in enumerate(texts)]
    (folder / "passages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    vectors = Encoder.load(folder / "encoder", device="cpu").encode_passages([row["title"] for row in rows], texts)
    np.save(folder / "vectors.npy", vectors, allow_pickle=False)
    recipe = Recipe(index={"flat": IndexRecipe("Flat")}, gate=GateRecipe(max_passage_loss=1.0))
    where = str(folder / "passages.jsonl"), (str(folder / "vectors.npy"),), str(folder / "store")
    import_library(*where, str(folder / "encoder"), recipe)
    for stage in ("lm", "retriever"):
        _open_task(folder, stage)  # records the lists and scores, which are no part of a step


def ours(folder: Path, stage: str, steps: int) -> list[Step]:
    """Run steps of a stage's task as this library trains."""
    task = _open_task(folder, stage)
    batch = task.batches(0)[0]
    return step_timing.take_our_steps(task.module.train(), lambda _: task.loss(batch)[0], steps, RATE)


def theirs(folder: Path, stage: str, steps: int) -> list[Step]:
    """Run steps of a plain loop on the same texts."""
    batch_rows = json.loads((folder / f"{stage}.json").read_text())
    return step_timing.take_plain_steps(
        *(_plain_lm if stage == "lm" else _plain_retriever)(folder, batch_rows), steps, RATE
    )


def write_batch(folder: Path, stage: str) -> None:
    """Write the inputs of a stage's first batch for the plain loop."""
    task = _open_task(folder, stage)
    batch = task.batches(0)[0]
    if stage == "lm":
        form, passages = task._generator.prompt_template, task._read_passages(batch, task._recipe.k)
        batch_rows = [
            [
                [form.render(training_example.text, passage).text for passage in example_passages],
                " " + training_example.answer,
            ]
            for training_example, example_passages in zip(batch, passages, strict=True)
        ]
    else:
        batch_rows = [
            [
                scored_list.text,
                list(scored_list.rows),
                scored_list.scores.log_p,
                scored_list.scores.n_tokens,
            ]
            for scored_list in batch
        ]
    (folder / f"{stage}.json").write_text(json.dumps(batch_rows))


def _plain_lm(folder: Path, batch_rows: Any) -> tuple[nn.Module, Loss]:
    model = AutoModelForCausalLM.from_pretrained(folder / "generator").train()
    tokenizer = AutoTokenizer.from_pretrained(folder / "generator")

    def loss(_: int) -> Tensor:
        rows = list[tuple[list[int], int]]()
        for prompts, answer in batch_rows:
            answer_ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            rows += [([*tokenizer(prompt)["input_ids"], *answer_ids], len(answer_ids)) for prompt in prompts]
        longest = max(len(row) for row, _ in rows)
        ids = torch.tensor([row + [1] * (longest - len(row)) for row, _ in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row, _ in rows])
        labels = torch.tensor(
            [
                [-100] * (len(row) - answer_length) + row[-answer_length:] + [-100] * (longest - len(row))
                for row, answer_length in rows
            ]
        )
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        total_loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return total_loss / len(batch_rows)

    return model, loss


def _plain_retriever(folder: Path, batch_rows: Any) -> tuple[nn.Module, Loss]:
    model = BertModel.from_pretrained(folder / "encoder", add_pooling_layer=False).train()
    tokenizer = AutoTokenizer.from_pretrained(folder / "encoder")
    vectors = torch.from_numpy(np.load(folder / "vectors.npy"))
    log_p = torch.tensor([scores for _, _, scores, _ in batch_rows], dtype=torch.float64)
    tokens = torch.tensor([count for *_, count in batch_rows])
    target = (log_p / tokens[:, None] / TAU).log_softmax(1).float()
    rows = torch.tensor([rows for _, rows, _, _ in batch_rows])

    def loss(_: int) -> Tensor:
        read = tokenizer(
            [text for text, *_ in batch_rows], padding=True, return_tensors="pt", return_token_type_ids=False
        )
        hidden, mask = model(**read).last_hidden_state, read["attention_mask"][..., None]
        query_vectors = nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        log_probabilities = (torch.einsum("bd,bkd->bk", query_vectors, vectors[rows]) / TEMPERATURE).log_softmax(1)
        return (log_probabilities.exp() * (log_probabilities - target)).sum(1).mean()

    return model, loss


def _open_task(folder: Path, stage: str) -> Any:
    settings = RaDitTraining(
        ra_dit=RaDitRecipe(stages=stage, k=K, temperature=TEMPERATURE, seed=1),  # type: ignore[arg-type]
        lm=LmRecipe(batch_size=B_LM),
        retriever=RetrieverRecipe(
            B_RETRIEVER, preference="mean_log_probability", preference_temperature=TAU, text_share=0.0
        ),
    )
    texts = [" ".join(_word(13 * number + position) for position in range(20)) for number in range(B_RETRIEVER)]
    answers = [" ".join(_word(7 * number + position) for position in range(ANSWER)) for number in range(B_RETRIEVER)]
    examples = [
        Example(str(number), *pair)
        for number, pair in enumerate(zip(texts, [(answer,) for answer in answers], strict=True))
    ]
    store = Store.open(str(folder / "store"))
    origins = InitialModels({"question": str(folder / "encoder"), "generator": str(folder / "generator")})
    job = Job(
        store,
        Snapshot.from_store(store, "latest"),
        origins,
        settings,
        {"train": examples, "dev": examples[:1]},
        {"question": "random"},
    )
    return RA_DIT.stages(job)[0].task(None, lambda _, __: None)


def _word(number: int) -> str:
    return f"w{4 + number % (WORDS - 4)}"


def _write_tokenizer(folder: Path, *, bert: bool) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"] if bert else ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = {word: number for number, word in enumerate(special)} | {f"w{n}": n for n in range(4, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, special[1] if bert else "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    if bert:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    else:
        names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
