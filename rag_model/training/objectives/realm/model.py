"""The model of REALM: a retriever of two encoders, and a masked language model that reads a text beside a passage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from rag_model.encoders.joint_tokens import MASKS
from rag_model.encoders.masked_lm import Hidden, TrainableMaskedLM
from rag_model.encoders.space import Space
from rag_model.store.versions.model_parts import MASKED_LM
from rag_model.training.objectives.biencoder import BiEncoder
from rag_model.training.objectives.realm.candidates import Candidates
from rag_model.training.objectives.realm.masking import Masked


class Realm(nn.Module):
    """Both encoders and the masked language model."""

    def __init__(self, encoders: BiEncoder, reader: TrainableMaskedLM, *, frozen: bool = False) -> None:
        """Join them; `frozen`: the encoders are not trained."""
        super().__init__()
        self.encoders, self.reader, self.frozen = encoders, reader, frozen
        if frozen:
            encoders.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; frozen encoders keep theirs, without dropout."""
        super().train(mode)
        if self.frozen:
            self.encoders.eval()
        return self

    def ask(self, texts: Sequence[Masked]) -> Tensor:
        """Return the (b, d) float32 vectors of texts with their masks, with gradient."""
        own = next((mark for mark in MASKS if self.encoders.question.tokenizer.token_to_id(mark) is not None), "")
        return self.encoders.ask([text.question.replace(self.reader.tokens.mask, own) for text in texts])

    def scores(self, asked: Tensor, candidates: Candidates) -> Tensor:
        """Return the (b, c) inner products of texts' vectors (b, d) with those of their candidates; 0 where none is.

        Vectors are those of the passage encoder as it is now, each passage of the batch once.
        """
        every = {passage.hash: passage for some in candidates.passages for passage in some}
        places = {key: place for place, key in enumerate(every)}
        read = self.encoders.read(list(every.values()))  # (u, d)
        rows = torch.tensor(
            [
                [places[passage.hash] for passage in some] + [0] * (candidates.most - len(some))
                for some in candidates.passages
            ],
            device=read.device,
        )
        with torch.autocast(read.device.type, enabled=False):
            return (read[rows].to(asked) * asked[:, None]).sum(-1)  # (b, c, d) * (b, 1, d) -> (b, c)

    def log_p(self, texts: Sequence[Masked], candidates: Candidates, longest: int) -> Tensor:
        """Return the (b, c, m) log p(y_j|z,x) of b texts' masked wordpieces; 0 where there is no mask or no candidate.

        The joint input is `[CLS] x [SEP] z [SEP]`, z the passage's title and text, cut at `longest` wordpieces. Null
        passages are a batch of their own: their inputs are a quarter as long.
        """
        cut = self._pieces(candidates, longest)
        nulls = [self._joined(text, ()) for text in texts]
        others = [
            (row, place, self._joined(text, cut[passage.hash]))
            for row, (text, some) in enumerate(zip(texts, candidates.passages, strict=True))
            for place, passage in enumerate(some)
            if place
        ]
        read: Tensor = self.reader(nulls, [one for _, _, one in others])  # (b + k, m)
        rows = [*range(len(texts)), *(row for row, _, _ in others)]
        places = [0] * len(texts) + [place for _, place, _ in others]
        found = read.new_zeros(len(texts), candidates.most, read.shape[1])  # (b, c, m)
        found[rows, places] = read
        return found

    def save(self, folder: Path) -> Space:
        """Write `question/`, `passage/` and `masked-lm/`; return the space of the passages."""
        self.reader.save(folder / MASKED_LM)
        return self.encoders.save(folder)

    def _pieces(self, candidates: Candidates, longest: int) -> dict[str, list[int]]:
        """Return the wordpieces of each passage's title and text, by hash, at most `longest`."""
        every = {passage.hash: f"{passage.title} {passage.text}" for some in candidates.passages for passage in some}
        pieces = self.reader.tokens.pieces(list(every.values()))
        return {key: own.ids[:longest] for key, own in zip(every, pieces, strict=True)}

    def _joined(self, text: Masked, passage: Sequence[int]) -> Hidden:
        tokens = self.reader.tokens
        room = max(0, tokens.longest - tokens.frame.size - len(text.ids))
        ids, types = tokens.join(text.ids, passage[:room])
        start = len(tokens.frame.before)
        return Hidden(ids, types, [start + place for place in text.places], text.targets)
