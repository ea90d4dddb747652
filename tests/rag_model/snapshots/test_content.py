"""The provenance in a manifest."""

from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.snapshots.content import BuiltIndex, build_provenance
from rag_model.store.objects.blobs import BlobRef


def test_changed_index_plan_is_noted_in_the_provenance() -> None:
    plans = {"hnsw": resolve(IndexRecipe("HNSW32"), 12, 384), "codes": resolve(IndexRecipe("IVF,PQ"), 12, 384)}
    indexes = [BuiltIndex(name, plan, BlobRef("sha256:" + "0" * 64, 1)) for name, plan in plans.items()]
    (note,) = build_provenance("dump.xml", "encoder", indexes, {})["notes"]
    assert note.startswith("index codes: 12 vectors are too few to train IVF,PQ")
