"""The generated world of `made_world` for masking: names as salient spans, and a small masked language model."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from made_world import SYLLABLES, WORDS, Fact, make_facts
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, set_seed

from rag_model.corpus.records import Passage
from rag_model.corpus.salient_spans import LINK, SalientSpan
from rag_model.encoders.masked_lm import MaskedInput, TrainableMaskedLM
from rag_model.training.data.examples import build_passage
from rag_model.training.objectives.realm_model import MaskingLimits, mask_text

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_LIMITS = MaskingLimits(48, 10, 0.15)
_NAMES = 0.8  # share of the texts in which a name is masked; in the others random words are


def passages(world: Sequence[Fact]) -> list[Passage]:
    """Return both wordings of each fact, one page each, in random order."""
    pages = [build_passage("", fact.format_sentence(form)) for fact in world for form in (0, 1)]
    random.Random(0).shuffle(pages)
    return [replace(page, id=f"{number}-0", page_id=str(number)) for number, page in enumerate(pages)]


def names_in(text: str, names: set[str]) -> list[SalientSpan]:
    """Return the spans of the world's names in a text."""
    spans, offset = list[SalientSpan](), 0
    for word in text.split(" "):
        if word in names:
            spans.append(SalientSpan(offset, offset + len(word), LINK))
        offset += len(word) + 1
    return spans


def write_masked_lm(folder: Path, steps: int, seed: int = 1, batch: int = 64) -> dict[str, float]:
    """Write a small BERT that fills in masked names and words of other worlds, alone and beside the other wording.

    Returns -log p of the masked tokens, in nats per text, of the last step: alone, and beside the other wording.
    """
    _write_untrained(folder, seed)
    reader, dice = TrainableMaskedLM.load(folder), random.Random(f"masks {seed}")
    optimizer = torch.optim.AdamW(reader.parameters(), lr=2e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    losses = {"alone": float("nan"), "beside": float("nan")}
    for _ in range(steps):
        inputs = _draw_inputs(reader, dice, batch)
        log_p = reader(inputs).sum(1)
        (-log_p.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        alone = batch // 4
        losses = {"alone": -float(log_p[:alone].detach().mean()), "beside": -float(log_p[alone:].detach().mean())}
    reader.save(folder)
    return losses


def _write_untrained(folder: Path, seed: int) -> None:
    pieces = [*_SPECIAL, *WORDS, *SYLLABLES, *(f"##{syllable}" for syllable in SYLLABLES)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # type: ignore[arg-type]
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    set_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 192, "max_position_embeddings": 96, "vocab_size": len(vocabulary)}
    config = BertConfig(**sizes, pad_token_id=0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "mask_token": "[MASK]", "model_max_length": 96}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _draw_inputs(reader: TrainableMaskedLM, dice: random.Random, batch: int) -> list[MaskedInput]:
    """Return masked texts: the first quarter alone, the others paired with the other wording of their fact."""
    lesson_facts = [dice.choice(make_facts(1, dice.randrange(1 << 40))) for _ in range(batch)]
    forms = [dice.randrange(2) for _ in lesson_facts]
    texts = [fact.format_sentence(form) for fact, form in zip(lesson_facts, forms, strict=True)]
    tokens, inputs = reader.tokenizer, list[MaskedInput]()
    other_wordings = tokens.tokenize(
        [fact.format_sentence(1 - form) for fact, form in zip(lesson_facts, forms, strict=True)]
    )
    for row, (fact, text, tokenized_text) in enumerate(zip(lesson_facts, texts, tokens.tokenize(texts), strict=True)):
        spans = [span[:2] for span in names_in(text, {fact.subject, fact.value})] if dice.random() < _NAMES else None
        masked = mask_text(text, tokenized_text, spans, dice, tokens, _LIMITS)
        ids, types = tokens.join_pair(masked.ids, other_wordings[row].ids if row >= batch // 4 else ())
        prefix_length = len(tokens.template.prefix)
        inputs.append(
            MaskedInput(ids, types, [prefix_length + position for position in masked.positions], masked.targets)
        )
    return inputs
