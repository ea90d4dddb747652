"""`index --plan` of kinds over tokens, terms and text: bytes and seconds before they are paid; nothing is built."""

from pathlib import Path
from typing import Any

import pytest


def test_a_plan_says_what_a_passage_costs(bookwheel: Any) -> None:
    result = bookwheel("index", "--plan", "--index", "MaxSim,Bits2", "--n", 21_015_324, "-d", 128, "--json")
    assert result.code == 0, result.err
    reply = result.json
    assert reply["beside_bytes"] == reply["n"] * 120 * 128 * 2
    assert reply["disk_bytes"] == pytest.approx(reply["n"] * (120 * (2 + 32) + 8), rel=0.01)
    assert reply["cpu_seconds"].keys() == reply["stage_bytes"].keys() == {"train", "scatter", "merge"}
    output = bookwheel("index", "--plan", "--index", "MaxSim", "--n", 1000, "-d", 96).out
    assert "MaxSim,PQ24 over 1,000 passages" in output
    assert "a passage" in output


def test_the_plan_and_the_benchmarks_page_name_one_time(bookwheel: Any) -> None:
    arguments = "index", "--plan", "--index", "HNSW32", "--n", 21_015_324, "-d", 768
    ran, printed = bookwheel(*arguments, "--json").json, bookwheel(*arguments).out
    minutes, error = sum(ran["cpu_seconds"].values()) / 60, ran["cpu_seconds_error"]
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8").replace("\n", " ")
    assert f"estimates {minutes:.0f} minutes of one core" in page
    assert f"within {error:.0%}".replace("%", " %") in page
    assert f"{minutes:,.1f} minutes of one core, about: measured builds" in printed
    assert f"differ by at most {error:.0%}" in printed


@pytest.mark.parametrize("factory", ["BM25", "Impact"])
def test_postings_are_planned_too(factory: str, bookwheel: Any) -> None:
    result = bookwheel("index", "--plan", "--index", factory, "--n", 1000, "--json")
    assert result.code == 0, result.err
    assert result.json["cpu_seconds"].keys() == {"train", "scatter", "merge"}
    assert result.json["disk_bytes"] < result.json["beside_bytes"]


def test_token_vectors_are_not_built_from_files(bookwheel: Any, tmp_path: Any) -> None:
    result = bookwheel("index", tmp_path / "a.npy", tmp_path / "out", "--index", "MaxSim")
    assert (result.code, "is not built over vectors from files" in result.complaint) == (2, True)
    result = bookwheel("index", "--plan", "--index", "MaxSim,PQ7", "--n", 10, "-d", 128)
    assert (result.code, "cannot cut 128 dimensions into 7 pieces" in result.complaint) == (2, True)
