"""`index --plan` estimates bytes and seconds of indexes over tokens, terms and text, without building them."""

from pathlib import Path
from typing import Any

import pytest


def test_plan_estimates_bytes_of_token_index(bookwheel: Any) -> None:
    result = bookwheel("index", "--plan", "--index", "MaxSim,Bits2", "--n", 21_015_324, "-d", 128, "--json")
    assert result.code == 0, result.err
    reply = result.json
    assert reply["beside_bytes"] == reply["n"] * 120 * 128 * 2
    assert reply["disk_bytes"] == pytest.approx(reply["n"] * (120 * (2 + 32) + 8), rel=0.01)
    assert reply["cpu_seconds"].keys() == reply["stage_bytes"].keys() == {"train", "scatter", "merge"}
    output = bookwheel("index", "--plan", "--index", "MaxSim", "--n", 1000, "-d", 96).out
    assert "MaxSim,PQ24 over 1,000 passages" in output
    assert "a passage" in output


def test_plan_agrees_with_benchmarks_page(bookwheel: Any) -> None:
    arguments = "index", "--plan", "--index", "HNSW32", "--n", 21_015_324, "-d", 768
    reply, output = bookwheel(*arguments, "--json").json, bookwheel(*arguments).out
    minutes, error = sum(reply["cpu_seconds"].values()) / 60, reply["cpu_seconds_error"]
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8").replace("\n", " ")
    assert f"estimates {minutes:.0f} minutes of one core" in page
    assert f"within {error:.0%}".replace("%", " %") in page
    assert f"{minutes:,.1f} minutes of one core, about: measured builds" in output
    assert f"differ by at most {error:.0%}" in output


@pytest.mark.parametrize("factory", ["BM25", "Impact"])
def test_plan_estimates_postings(factory: str, bookwheel: Any) -> None:
    result = bookwheel("index", "--plan", "--index", factory, "--n", 1000, "--json")
    assert result.code == 0, result.err
    assert result.json["cpu_seconds"].keys() == {"train", "scatter", "merge"}
    assert result.json["disk_bytes"] < result.json["beside_bytes"]


def test_token_index_refuses_vector_files_and_uneven_pieces(bookwheel: Any, tmp_path: Any) -> None:
    result = bookwheel("index", tmp_path / "a.npy", tmp_path / "out", "--index", "MaxSim")
    assert (result.code, "is not built over vectors from files" in result.complaint) == (2, True)
    result = bookwheel("index", "--plan", "--index", "MaxSim,PQ7", "--n", 10, "-d", 128)
    assert (result.code, "cannot cut 128 dimensions into 7 pieces" in result.complaint) == (2, True)
