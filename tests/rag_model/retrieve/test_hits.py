"""The JSON of a hit is read back, and the description of the service has all its fields."""

import json
from dataclasses import replace

import pytest

from rag_model.client.replies import QueryResult, ReadHit, parse_reply
from rag_model.corpus.records import Passage
from rag_model.retrieve.hits import HIT_JSON_FIELDS, OPTIONAL_HIT_JSON_FIELDS, Hit, LegHit
from rag_model.serving.http import messages

PASSAGE = Passage(
    *("12-0", "12", 99, "Anarchism", "History", "text", 0, 1, "ab", 1793534400),
    *("prose", "en", "Q6199", "Ideologies|Politics"),
)
HIT = Hit(2, 0.25, 7, PASSAGE, "https://x/?oldid=99", "CC", 0.5, (LegHit("hnsw", 1, 0.5), LegHit("bm25", 3, 9.0)))


def test_a_hit_is_read_back_from_its_json() -> None:
    document = json.loads(json.dumps(HIT.to_json()))
    (hit,) = parse_reply(QueryResult, {"question": "q", "hits": [document]}).hits
    assert hit.to_json() == HIT.to_json()
    assert (hit.id, hit.title, hit.section, hit.text) == ("12-0", "Anarchism", "History", "text")
    assert (hit.revised, hit.row, hit.inner_product) == ("2026-11-01T12:00:00Z", -1, None)
    assert parse_reply(ReadHit, {**document, "weight": 0.5, "posterior": None}).weight == 0.5


def test_legs_of_a_single_index_are_left_out() -> None:
    alone = replace(HIT, legs=(LegHit("hnsw", 2, 0.25),))
    assert "legs" not in alone.to_json()
    assert alone.visible_legs == ()
    assert [*HIT.to_json()][-1] == "legs"


def test_the_description_of_the_service_has_the_same_fields() -> None:
    assert messages.create_model(Hit).model_fields.keys() == HIT_JSON_FIELDS.keys() == HIT.to_json().keys()
    assert HIT_JSON_FIELDS.keys() > OPTIONAL_HIT_JSON_FIELDS


@pytest.mark.parametrize("name", sorted(HIT_JSON_FIELDS.keys() - OPTIONAL_HIT_JSON_FIELDS))
def test_a_missing_field_is_named(name: str) -> None:
    document = HIT.to_json()
    del document[name]
    with pytest.raises(ValueError, match=rf"hits\[0\]\.{name} is missing"):
        parse_reply(QueryResult, {"question": "q", "hits": [document]})
