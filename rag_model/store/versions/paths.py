"""The paths of a snapshot's files in its manifest; a pulled folder has the same paths."""

EMBEDDINGS = "embeddings"  # the representation that every build makes: one vector per passage
TOKENS = "tokens"  # the kind of a representation with many vectors a passage, and the usual name of one
SPARSE = "sparse"  # the kind of a representation of weighted terms, and the usual name of one
TEXT = "text"  # the representation that every snapshot has: title and text of its passages
QUESTION_ENCODER = "encoder/question"  # folder of the encoder of queries into the representation `embeddings`
EXACT = "exact"  # the index of any snapshot with vectors; without a file it is a search over the embeddings


def passages_path(part: str) -> str:
    """Return the path of a part's passages."""
    return f"passages/{part}.parquet"


_SUFFIXES = {TOKENS: ".arrow", SPARSE: ".sparse"}  # by kind; of vectors: .npy


def embeddings_path(part: str, representation: str = EMBEDDINGS, kind: str = "vectors") -> str:
    """Return the path of a part's rows in a representation of the kind `vectors`, `tokens` or `sparse`."""
    folder = EMBEDDINGS if representation == EMBEDDINGS else f"{EMBEDDINGS}/{representation}"
    return f"{folder}/{part}{_SUFFIXES.get(kind, '.npy')}"


def rows_kind(path: str) -> str:
    """Return the kind of a representation's rows by their path: `embeddings`, `tokens` or `sparse`."""
    return next((kind for kind, suffix in _SUFFIXES.items() if path.endswith(suffix)), EMBEDDINGS)


def question_encoder(representation: str = EMBEDDINGS) -> str:
    """Return the folder of the encoder of queries into a representation."""
    return QUESTION_ENCODER if representation == EMBEDDINGS else f"encoder/{representation}/question"


def index_path(name: str, suffix: str = "faiss") -> str:
    """Return the path of an index's file."""
    return f"index/{name}.{suffix}"


def trained_path(name: str) -> str:
    """Return the path of an index's trained file, its cells or quantizers: only later builds read it."""
    return f"trained/{name}"


def articles_path(part: str) -> str:
    """Return the path of a part's article log, with the outcome of each article: only later builds read it."""
    return f"articles/{part}.parquet"


def spans_path(part: str) -> str:
    """Return the path of a part's salient spans, of links and dates: trainings that mask them read it."""
    return f"spans/{part}.npy"
