"""What a passage costs: bytes as the index has them, seconds that grow with the centroids."""

from rag_model.index.recipe import IndexRecipe
from rag_model.index.tokens.cost import cost_of
from rag_model.index.tokens.kind import KIND, TOKENS


def test_bytes_follow_from_the_codec_and_seconds_are_measured() -> None:
    costs = {
        factory: cost_of(KIND.plan(IndexRecipe(factory), 1_000, 64))
        for factory in ("MaxSim,Bits2", "MaxSim,PQ16", "MaxSim,PQ16x4")
    }
    assert [one.code_bytes for one in costs.values()] == [TOKENS * (2 + width) + 8 for width in (16, 16, 8)]
    assert all(one.coding_seconds > 0 for one in costs.values())
    assert costs["MaxSim,PQ16"].vector_bytes == TOKENS * 64 * 2
    assert costs["MaxSim,PQ16"].centroids == 2_048  # 4,096 are wanted, and 120,000 tokens train 3,076
