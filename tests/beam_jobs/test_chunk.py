"""How long the chunk job is thought to take: that decides where it is done."""

from beam_jobs.chunk import ChunkTask, _seconds
from rag_model.corpus.chunk import ChunkRecipe
from rag_model.corpus.records import Part, Siteinfo, Slice
from rag_model.store.objects.blobs import BlobRef

MEGABYTE = Slice("dump.xml.bz2", 0, 1 << 20, "bz2", 1, 9)
SITE = Siteinfo("enwiki", "en", "")


def seconds(size: int = 0) -> float:
    """Of a megabyte, cut by a chunker whose encoder has `size` bytes."""
    files = (("encoder", (("model.safetensors", BlobRef("sha256:" + "0" * 64, size)),)),) if size else ()
    return _seconds(ChunkTask(Part("part-00000", "wiki", 1, 9, (MEGABYTE,)), SITE, ChunkRecipe(), setting_files=files))


def test_a_chunker_with_a_model_takes_as_long_as_encoding_its_passages() -> None:
    assert 0.5 < seconds() < 2
    assert seconds(700_000) < 2, "a tokenizer"
    assert 20 < seconds(90_000_000) < 80, "MiniLM: 3,400 passages"
