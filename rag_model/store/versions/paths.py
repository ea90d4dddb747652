"""The paths of a snapshot's files in its manifest, which are also those of a pulled folder."""

QUESTION_ENCODER = "encoder/question"  # folder of the encoder that may ask it
EXACT = "exact"  # the index of any snapshot with vectors: without a file of its own it is the embeddings, all compared


def passages_path(part: str) -> str:
    """Return where a part's passages lie."""
    return f"passages/{part}.parquet"


def embeddings_path(part: str) -> str:
    """Return where a part's vectors lie."""
    return f"embeddings/{part}.npy"


def index_path(name: str) -> str:
    """Return where an index lies."""
    return f"index/{name}.faiss"


def trained_path(name: str) -> str:
    """Return where it lies what an index's workers shared, its cells or quantizers: read by later builds alone."""
    return f"trained/{name}"


def articles_path(part: str) -> str:
    """Return where it lies what became of each article of a part: read by later builds alone."""
    return f"articles/{part}.parquet"
