"""Classification by a RAG model: each label is one token, and the most likely one is the answer.

Lewis et al. 2020 (section 3.4) map each of FEVER's labels to a single output token. For a target of one token
RAG-Sequence and RAG-Token are the same:

    p(y|x) = Σ_z p(z|x) p(y|x,z)

so this has no variant. No end token follows, and what begins every target, such as BART's <s>, is given and not
counted: either would be a second token, whose likelihood the variants marginalise differently.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rag_model.errors import UsageError
from rag_model.generate.generator import Contexts, Generator, Targets


def label_tokens(generator: Generator, words: Sequence[str]) -> list[int]:
    """Return the token of each label's word.

    Raises:
        UsageError: a word is not one token of this generator, or two words are the same one.
    """
    found: list[int] = []
    for word in words:
        targets = generator.targets([word])
        row = targets.tokens[0][targets.mask[0]].tolist()
        inner = row[1:] if row and row[0] == generator.first else row
        inner = inner[:-1] if inner and inner[-1] == generator.end else inner
        if len(inner) != 1:
            raise UsageError(
                f"the label's word {word!r} is {len(inner)} tokens of this model: give a word of one token for it, as "
                "in --label SUPPORTS=true"
            )
        found += inner
    if len(set(found)) < len(found):
        raise UsageError(f"two of the labels' words {', '.join(map(repr, words))} are one token: give different ones")
    return found


def label_log_p(generator: Generator, contexts: Contexts, tokens: Sequence[int]) -> Tensor:
    """Return (b, k, l) log p(label|x,z) over the whole vocabulary, of the labels' tokens."""
    begun = [] if generator.first is None else [generator.first]
    device = contexts.tokens.device
    row = torch.tensor([*begun, tokens[0]], device=device).expand(len(contexts.tokens) // contexts.k, -1)  # (b, t)
    logits = generator.logits(contexts, Targets(row, torch.ones_like(row, dtype=torch.bool)))  # (b, k, t, v)
    log_p = logits[:, :, -1].float().log_softmax(-1)  # (b, k, t, v) -> (b, k, v)
    return log_p[..., list(tokens)]
