"""What a manifest says beside its content."""

from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.snapshots.content import BuiltIndex, build_provenance
from rag_model.store.objects.blobs import BlobRef


def test_what_could_not_be_built_as_asked_is_said() -> None:
    plans = {"hnsw": resolve(IndexRecipe("HNSW32"), 12, 384), "codes": resolve(IndexRecipe("IVF,PQ"), 12, 384)}
    built = [BuiltIndex(name, plan, BlobRef("sha256:" + "0" * 64, 1)) for name, plan in plans.items()]
    (note,) = build_provenance("dump.xml", "encoder", built, {})["notes"]
    assert note.startswith("index codes: 12 vectors are too few to train IVF,PQ")
