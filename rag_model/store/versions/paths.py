"""The paths of a snapshot's files in its manifest; a pulled folder has the same paths."""

EMBEDDINGS = "embeddings"  # the representation that every build makes: one vector per passage
TOKENS = "tokens"  # the kind of a representation with many vectors a passage, and the usual name of one
TEXT = "text"  # the representation that every snapshot has: title and text of its passages
QUESTION_ENCODER = "encoder/question"  # folder of the encoder of queries into the representation `embeddings`
EXACT = "exact"  # the index of any snapshot with vectors; without a file it is a search over the embeddings


def passages_path(part: str) -> str:
    """Return the path of a part's passages."""
    return f"passages/{part}.parquet"


_TOKENS_SUFFIX = ".arrow"


def embeddings_path(part: str, representation: str = EMBEDDINGS, kind: str = "vectors") -> str:
    """Return the path of a part's vectors in a representation, of one vector a passage or of many (`tokens`)."""
    folder = EMBEDDINGS if representation == EMBEDDINGS else f"{EMBEDDINGS}/{representation}"
    return f"{folder}/{part}{_TOKENS_SUFFIX if kind == TOKENS else '.npy'}"


def is_tokens(path: str) -> bool:
    """Whether a path of vectors is one of many vectors a passage."""
    return path.endswith(_TOKENS_SUFFIX)


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
