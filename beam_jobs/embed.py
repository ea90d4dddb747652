"""The embed job: a part's passages become, row for row, one array of vectors."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

from beam_jobs.job import Facts, Launch, OnProgress, run_job
from beam_jobs.libraries import versions
from rag_model.build.encoding import StoredEncoder
from rag_model.encoders.embed import Dtype, embed_part
from rag_model.encoders.encoder import Encoder
from rag_model.store.blobs import BlobRef
from rag_model.store.memo import Produced
from rag_model.store.store import Store
from rag_model.store.trees import linked_tree

CODE = 1  # raise it when the same passages would give other vectors


@dataclass(frozen=True, slots=True)
class EmbedTask:
    """One part's passages and the encoder that reads them."""

    passages: BlobRef
    digest: str  # of the rows' values, not of the file
    encoder: tuple[tuple[str, BlobRef], ...]  # its files in the store, by name
    space: str
    dtype: Dtype

    @classmethod
    def of(cls, cut: Facts, encoder: StoredEncoder, dtype: Dtype) -> Self:
        """Return the task of a part that the chunk job reported."""
        passages = BlobRef.from_json(cut["passages"])
        return cls(passages, cut["digest"], encoder.passage, encoder.space.digest, dtype)


def embed(task: EmbedTask, store: Store) -> Facts:
    """Encode one part into `embeddings`, once: the same passages in the same space are never encoded again."""

    def produce(workdir: Path) -> Produced:
        out = workdir / "embeddings.npy"
        encoder = _encoder(store.url, task.encoder)
        facts = embed_part(store.blobs.local(task.passages), out, encoder, dtype=task.dtype)
        return Produced({"embeddings": out}, asdict(facts))

    inputs = {
        "passages": task.digest,
        "space": task.space,
        "dtype": task.dtype,
        "code": CODE,
        "libraries": versions("torch", "transformers", "tokenizers"),
    }
    record, made = store.memo.once("embed", inputs, produce)
    return {**record.facts, "embeddings": asdict(record.outputs["embeddings"]), "made": made}


@lru_cache(maxsize=1)  # a worker loads the model once, for the first part that needs it
def _encoder(store_url: str, files: tuple[tuple[str, BlobRef], ...]) -> Encoder:
    blobs = Store.open(store_url).blobs
    return Encoder.load(linked_tree({name: blobs.local(ref) for name, ref in files}))


def run(tasks: Sequence[EmbedTask], launch: Launch, on_progress: OnProgress | None = None) -> list[Facts]:
    """Encode all parts; return each one's facts, in their order.

    The largest start first: local workers are dealt tasks in turn, and so are dealt about the same work.
    """
    order = sorted(range(len(tasks)), key=lambda number: -tasks[number].passages.size)
    facts = run_job("embed", embed, [tasks[number] for number in order], launch, on_progress)
    by_number = dict(zip(order, facts, strict=True))
    return [by_number[number] for number in range(len(tasks))]
