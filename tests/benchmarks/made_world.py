"""A generated corpus whose names and words no encoder has seen, questions about it, and a small reader that can copy.

Every subject has a value for each of 8 relations, stated in two passages with different words. Passages name a relation
by an invented word, questions by an English one; training has to learn the mapping.
"""

import json
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import BartConfig, BartForConditionalGeneration, set_seed

from rag_model.encoders.spec import RECORD_FILE
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import PaperTemplate, template_to_json
from rag_model.training.data.examples import Example, build_passage

SYLLABLES = [a + b + c for a in "bdgklmnprstvz" for b in "aeiou" for c in "lmnr"][::4]
RELATIONS = {"capital": "brelk", "river": "tossin", "ruler": "vemmar", "festival": "quorin"} | {
    "harbour": "zandel", "mountain": "pirrow", "founder": "hulbar", "language": "degath"
}  # fmt: skip
FORMS = ("in {name} the {word} is called {value} .", "{value} is the {word} that {name} has .")
WORDS = [
    "in",
    "the",
    "is",
    "called",
    "that",
    "has",
    "what",
    "of",
    "<p>",
    "?",
    ".",
    "/",
    *RELATIONS,
    *RELATIONS.values(),
]
FORM = PaperTemplate(title_sep="", doc_sep=" / ", max_length=60, max_answer=24)
_BEGIN, _PAD, _END = 0, 1, 2
_WORDS = "embeddings.word_embeddings.weight"
_LAYER = re.compile(r"encoder\.layer\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Fact:
    """The value of one relation of one subject."""

    subject: str
    relation: str  # English
    value: str

    @property
    def question(self) -> str:
        return f"what is the {self.relation} of {self.subject} ?"

    def format_sentence(self, form: int) -> str:
        words = {"name": self.subject, "word": RELATIONS[self.relation], "value": self.value}
        return FORMS[form].format(**words)


def make_facts(subjects: int, seed: int) -> list[Fact]:
    """Return 8 facts for each subject, in order of subjects; no name occurs twice."""
    dice = random.Random(f"world {seed}")
    names = list(dict.fromkeys("".join(dice.sample(SYLLABLES, 3)) for _ in range(12 * subjects)))
    return [
        Fact(names[9 * number], relation, names[9 * number + 1 + position])
        for number in range(subjects)
        for position, relation in enumerate(RELATIONS)
    ]


def write_corpus(world: Sequence[Fact], path: Path) -> None:
    """Write two documents for each fact, in random order."""
    rows = [
        {"id": f"{number}-{form}", "title": "", "text": fact.format_sentence(form)}
        for number, fact in enumerate(world)
        for form in (0, 1)
    ]
    random.Random(0).shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_examples(world: Sequence[Fact]) -> list[Example]:
    """Return one question for each fact."""
    return [
        Example(
            f"{fact.subject} {fact.relation}",
            fact.question,
            (fact.value,),
            (build_passage("", fact.format_sentence(0)),),
        )
        for fact in world
    ]


def write_short_encoder(folder: Path, layers: int, world: Sequence[Fact], to: Path) -> Path:
    """Write a BERT's first layers, with a vocabulary reduced to that of the world's texts; return its folder.

    The world's texts get the same tokens, and a step costs a tenth.
    """
    shutil.copytree(folder, to)
    tokens = json.loads((to / "tokenizer.json").read_text())
    pieces = {token_id: piece for piece, token_id in tokens["model"]["vocab"].items()}
    tokenizer = Tokenizer.from_file(str(to / "tokenizer.json"))
    tokenizer.no_padding()
    texts = [
        "<p>",
        *(text for fact in world for text in (fact.question, fact.format_sentence(0), fact.format_sentence(1))),
    ]
    used = {token_id for read in tokenizer.encode_batch(texts) for token_id in read.ids}
    rows = sorted(used | set(range(1 + max(token["id"] for token in tokens["added_tokens"]))))
    tokens["model"]["vocab"] = {pieces[row]: new_id for new_id, row in enumerate(rows)}
    (to / "tokenizer.json").write_text(json.dumps(tokens))
    (to / "vocab.txt").write_text("".join(f"{pieces[row]}\n" for row in rows))
    weights = load_file(to / "model.safetensors")
    short_weights = {name: weight for name, weight in weights.items() if int((*_LAYER.findall(name), 0)[0]) < layers}
    short_weights[_WORDS] = short_weights[_WORDS][rows].contiguous()
    save_file(short_weights, to / "model.safetensors", {"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers, "vocab_size": len(rows)}))
    return to


def write_reader(folder: Path, steps: int, seed: int = 1, batch: int = 64) -> float:
    """Write a small BART that copies answers and statements from passages of other worlds; return its last loss."""
    pieces = [*WORDS, *SYLLABLES, *(f"##{syllable}" for syllable in SYLLABLES)]
    vocabulary = {
        token: number for number, token in enumerate(dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>", *pieces]))
    }
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))  # type: ignore[arg-type]
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    ends = [("<s>", _BEGIN), ("</s>", _END)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    sizes = {
        f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 4))
    }
    sizes |= {"d_model": 96, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192, "vocab_size": len(vocabulary)}
    set_seed(seed)
    special = {"bos_token_id": _BEGIN, "pad_token_id": _PAD, "eos_token_id": _END, "decoder_start_token_id": _END}
    config = BartConfig(**sizes, **special, max_position_embeddings=64, dropout=0.0, forced_eos_token_id=None)
    BartForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names: dict[str, Any] = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    reader = load_generator(folder, FORM, device="cpu")
    optimizer = torch.optim.AdamW(reader.module.parameters(), lr=2e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    value = float("nan")
    for texts, answers, passages in _draw_batches(steps, batch, seed):
        contexts, targets = (
            reader.encode_contexts(texts, [[build_passage("", passage)] for passage in passages]),
            reader.encode_targets(answers),
        )
        logits = reader.logits(contexts, targets).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits[targets.mask], targets.tokens[targets.mask])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        value = float(loss.detach())
    reader.module.save_pretrained(folder)
    (folder / RECORD_FILE).write_text(json.dumps({"form": template_to_json(FORM)}))
    return value


def _draw_batches(steps: int, batch: int, seed: int) -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Yield batches: questions with an answering passage, and marked statements with a passage of equal meaning."""
    dice = random.Random(f"lessons {seed}")
    for _ in range(steps):
        lesson_facts = [dice.choice(make_facts(1, dice.randrange(1 << 40))) for _ in range(batch)]
        forms = [dice.randrange(2) for _ in lesson_facts]
        half = batch * 2 // 3
        fact_forms = list(zip(lesson_facts, forms, strict=True))
        yield (
            [fact.question for fact in lesson_facts[:half]] + ["<p>"] * (batch - half),
            [fact.value for fact in lesson_facts[:half]]
            + [fact.format_sentence(1 - form) for fact, form in fact_forms[half:]],
            [fact.format_sentence(form) for fact, form in fact_forms],
        )
