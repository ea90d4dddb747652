"""The embed job: encode a part's passages into one file of rows, one vector each, many, or weighted terms."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self

from beam_jobs.job import run_job
from beam_jobs.launch import Launch, OnProgress, Report
from beam_jobs.workers import gpus
from rag_model.allocator import reuse_freed
from rag_model.encoders.carried import load_reading
from rag_model.encoders.embed import VERSION, Dtype
from rag_model.encoders.forms import Form, FormName, form_of
from rag_model.encoders.spec import EncoderSpec
from rag_model.extras import versions
from rag_model.needs.machine import LOOKED_UP, PROCESS
from rag_model.snapshots.cut_part import CutPart
from rag_model.snapshots.encoded_part import EncodedPart
from rag_model.snapshots.encoding import StoredEncoder
from rag_model.snapshots.parent import Earlier, local_files
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import Produced
from rag_model.store.objects.trees import linked_tree
from rag_model.store.store import Store

_READ = 2e7  # bytes of passages per second of one core: hashes looked up, vectors copied
_ENCODED = 8e9  # passages times bytes of weights per second of one core: 85 passages for a model of 91 MB


@dataclass(frozen=True, slots=True)
class EmbedTask:
    """One part's passages and the encoder for them."""

    passages: BlobRef
    digest: str  # of the rows' values, not of the file
    encoder: tuple[tuple[str, BlobRef], ...]  # its files in the store, by name
    space: str
    dim: int
    dtype: Dtype
    kind: FormName = "vectors"  # of a passage: one vector, many, or weighted terms
    scale: int = 0  # units of a term's weight of 1
    earlier: tuple[Earlier, ...] = ()  # parts of the parent, whose passages' vectors are reused
    new: int = 0  # estimated number of passages to encode
    static: bool = False  # whether the encoder has no transformer, and so takes no time to speak of

    @classmethod
    def of(cls, cut: CutPart, encoder: StoredEncoder, dtype: Dtype, earlier: tuple[Earlier, ...] = ()) -> Self:
        """Return the task of a part that the chunk job reported."""
        facts, space = cut.facts, encoder.space
        kept = facts.inherited / facts.articles if earlier and facts.articles else 0.0
        new = round(facts.rows * (1 - kept))
        rows = facts.digest or cut.passages.id  # of passages that no recipe of this run cut, that of their file
        told = cut.passages, rows, encoder.passage, space.digest, space.dim, dtype, encoder.kind, encoder.scale
        return cls(*told, earlier, new, isinstance(encoder.spec, EncoderSpec) and encoder.spec.is_static)

    @property
    def form(self) -> Form:
        """The form of the rows."""
        return form_of(self.kind, self.dim, self.dtype, self.scale)

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that decide the vectors, up to rounding. Inherited parts are not an input."""
        return {
            "passages": self.digest,
            "space": self.space,
            "dtype": self.dtype,
            "code": VERSION,
            "libraries": versions("torch", "transformers", "tokenizers"),
        }


def embed(task: EmbedTask, store: Store) -> Report:
    """Encode one part into `embeddings`, once: the same passages in the same space are never encoded again."""

    def produce(workdir: Path) -> Produced:
        out = workdir / "embeddings.npy"
        passages, earlier = store.blobs.local(task.passages), local_files(store, task.earlier)
        facts = task.form.embed(passages, out, partial(_encoder, store.url, task.encoder), earlier)
        return Produced({"embeddings": out}, asdict(facts))

    record, made = store.memo.once("embed", task.inputs(), produce)
    return EncodedPart.of(record, made=made).to_json()


@lru_cache(maxsize=1)  # a worker loads the model once, for the first part that needs it
def _encoder(store_url: str, files: tuple[tuple[str, BlobRef], ...]) -> Any:
    reuse_freed()
    blobs = Store.open(store_url).blobs
    return load_reading(linked_tree({name: blobs.local(ref) for name, ref in files}))


def run(tasks: Sequence[EmbedTask], launch: Launch, on_progress: OnProgress | None = None) -> list[EncodedPart]:
    """Encode all parts; return each one's report, in their order."""
    launch = launch.holding(PROCESS + 2 * max(map(_weights, tasks), default=0))
    if any(task.new and not task.static for task in tasks):
        launch = launch.for_gpus(gpus())
    reports = run_job("embed", embed, tasks, launch, on_progress, _seconds, memoised=True)
    return [EncodedPart.from_json(report) for report in reports]


def _seconds(task: EmbedTask) -> float:
    encoded = LOOKED_UP if task.static else _weights(task) / _ENCODED
    return task.passages.size / _READ + task.new * encoded


def _weights(task: EmbedTask) -> int:
    """Return the bytes of the encoder's files, which are mostly weights."""
    return sum(blob.size for _, blob in task.encoder)
