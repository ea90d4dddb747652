"""The cost of reading passages with a model: formulas that trainings and evaluations share.

They are upper bounds: every passage counts as a long one.
"""

from rag_model.encoders.architecture import Architecture
from rag_model.errors import UsageError
from rag_model.store.versions.paths import EXACT, embeddings_path
from rag_model.store.versions.snapshot import Snapshot

QUESTION = 32  # tokens of a question
PASSAGE = 160  # tokens of a passage and its title
PROMPT = QUESTION + PASSAGE + 32  # tokens of a generator's input without the answer
NUMBER = 4  # bytes of a float32
_KEPT = 2  # numbers that a layer keeps per token and hidden unit while it decodes: key and value


def weights(*models: Architecture) -> int:
    """Return the bytes of models' weights in float32."""
    return NUMBER * sum(model.parameters for model in models)


def index_bytes(snapshot: Snapshot, index: str) -> int:
    """Return the bytes of a snapshot's index in memory: the size of its file; for the exact index that of the vectors,
    which are mapped.

    Raises:
        UsageError: the snapshot has no such index.
    """
    content = snapshot.manifest.content
    files, indexes = content.files, content.indexes
    if index != EXACT and index not in indexes:
        raise UsageError(
            f"snapshot {snapshot.id[:12]} has no index {index!r}: choose one of {', '.join(indexes)}, {EXACT}"
        )
    paths = [content.index_file(index)] if index != EXACT else [embeddings_path(part.name) for part in snapshot.parts]
    return sum(files[path].size for path in paths if path in files)


def decoding_bytes(generator: Architecture, texts: int, answer: int) -> int:
    """Estimate the bytes to decode answers of `answer` tokens for `texts` prompts at once."""
    kept = _KEPT * generator.layers * generator.hidden * (PROMPT + answer)
    return NUMBER * texts * (2 * kept + 2 * generator.vocabulary + 8 * generator.hidden * PROMPT)
