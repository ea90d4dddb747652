"""Training examples about kings and their cities, and a tiny encoder to train on them."""

from pathlib import Path

import pytest

from rag_model.training.data.examples import Example, build_passage
from tests.fixtures.tiny import save_bert

KINGS = ["arthur", "boris", "conrad", "david", "edwin", "fergus", "george", "harald", "igor", "john", "karl", "louis"]
CITIES = ["york", "oslo", "riga", "bonn", "bath", "lima", "kiev", "rome", "nice", "bern", "pisa", "graz"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("tiny"), seed=4)


@pytest.fixture(scope="session")
def kings() -> list[Example]:
    """Two examples for each king; the negative of each is a passage about a war."""
    examples = []
    for number, (king, city) in enumerate(zip(KINGS, CITIES, strict=True)):
        passage = build_passage(king, f"the king {king} was born in the city of {city}.")
        war_passage = build_passage(king, f"the war of {king} was a war in the river.")
        for kind, question in (("a", f"who was born in {city}?"), ("b", f"king of {city}?")):
            examples.append(Example(f"{number}{kind}", question, (king,), (passage,), (war_passage,)))
    return examples
