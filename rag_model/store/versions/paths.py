"""The paths of a snapshot's files in its manifest, which are also those of a pulled folder."""

EMBEDDINGS = "embeddings"  # the representation that every build makes: one vector a passage under its encoder
TEXT = "text"  # the representation that every snapshot has: title and text of its passages
QUESTION_ENCODER = "encoder/question"  # folder of the encoder that may ask the representation `embeddings`
EXACT = "exact"  # the index of any snapshot with vectors: without a file of its own it is the embeddings, all compared


def passages_path(part: str) -> str:
    """Return the path of a part's passages."""
    return f"passages/{part}.parquet"


def embeddings_path(part: str, representation: str = EMBEDDINGS) -> str:
    """Return the path of a part's vectors in a representation."""
    folder = EMBEDDINGS if representation == EMBEDDINGS else f"{EMBEDDINGS}/{representation}"
    return f"{folder}/{part}.npy"


def rows_path(representation: str, part: str) -> str:
    """Return the path of the file that holds a part's rows of a representation: its passages, or its vectors."""
    return passages_path(part) if representation == TEXT else embeddings_path(part, representation)


def question_encoder(representation: str = EMBEDDINGS) -> str:
    """Return the folder of the encoder that may ask a representation."""
    return QUESTION_ENCODER if representation == EMBEDDINGS else f"encoder/{representation}/question"


def index_path(name: str, suffix: str = "faiss") -> str:
    """Return the path of an index's file."""
    return f"index/{name}.{suffix}"


def trained_path(name: str) -> str:
    """Return the path of an index's trained file, its cells or quantizers: read by later builds alone."""
    return f"trained/{name}"


def articles_path(part: str) -> str:
    """Return the path of a part's article log, what became of each article: read by later builds alone."""
    return f"articles/{part}.parquet"
