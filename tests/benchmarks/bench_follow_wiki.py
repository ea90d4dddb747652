"""Measure following a real MediaWiki: the time from an edit to a served answer, and the cost of a day of edits.

A wiki of generated pages (PHP's own server, SQLite; `BOOKWHEEL_MEDIAWIKI` names its folder) is
built, served, and followed by `bookwheel reindex --every`. `freshness` is the time from a saved
edit until `/search` returns the new words. `requests` are the requests to the wiki's API for each
changed page. `day` has edits in a number of builds, each in its own process like a scheduled one;
`ratio` is the CPU seconds of such a build over those of a full build of the same wiki in a new
store. Prints one JSON line.
`python tests/benchmarks/bench_follow_wiki.py [--pages 200] [--edits 5] [--day 20] [--builds 2]
[--encoder DIR]`; the encoder is by default a random one-layer BERT. docs/benchmarks.md used
`--pages 10000 --edits 10 --day 1000 --builds 10`.
"""

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dumps import UNGATED
from processes import run
from service_load import service

from tests.fixtures.tiny import save_bert
from tests.fixtures.wiki_server import Wiki, build_export, run_wiki

_BOOKWHEEL = str(Path(sys.executable).with_name("bookwheel"))
_BATCH = 500  # pages of an import


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--edits", type=int, default=5, help="edits whose freshness is measured")
    parser.add_argument("--day", type=int, default=20, help="edits of the day")
    parser.add_argument("--builds", type=int, default=2, help="builds of the day")
    parser.add_argument("--encoder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, run_wiki(Path(name) / "wiki") as wiki:
        print(json.dumps(measure(wiki, Path(name), options)))


def measure(wiki: Wiki, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(0)
    fill(wiki, options.pages, draw)
    encoder = options.encoder or save_bert(folder / "encoder")
    (folder / "recipe.toml").write_text(UNGATED)
    command = [_BOOKWHEEL, "reindex", "--dump", wiki.dump, "--encoder", str(encoder)]
    command += ["--recipe", str(folder / "recipe.toml")]
    wiki.queries.clear()
    first = run([*command, "--store", str(folder / "store"), "--json"])
    counts = json.loads(first.output)["counts"]
    report: dict[str, Any] = {
        "benchmark": "follow_wiki",
        "pages": options.pages,
        "passages": counts["passages"],
        "first": {
            "seconds": round(first.seconds, 1),
            "cpu": round(first.cpu_seconds, 1),
            "requests": len(wiki.queries),
        },
    }
    with (
        service(str(folder / "store"), folder / "served", "--poll", "1") as (address, _),
        following([*command, "--store", str(folder / "store"), "--every", "1s"]),
    ):
        waits, requests = [], []
        for i in range(options.edits):
            time.sleep(3)  # the follower is idle again
            wiki.queries.clear()
            waits.append(wait_for_answer(wiki, address, f"Page {draw.randrange(options.pages)}", f"zyzzyva{i}"))
            requests.append(sum("pageids" in query for query in wiki.queries))
        report["freshness"] = {"median": round(statistics.median(waits), 1), "max": round(max(waits), 1)}
        report["requests for one edit"] = statistics.mean(requests)
    report["day"] = spend_day(wiki, folder, [*command, "--json"], options, draw)
    return report


def fill(wiki: Wiki, pages: int, draw: random.Random) -> None:
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(3, 9))) for _ in range(5_000)]

    def write_text() -> str:
        sentences = (" ".join(draw.choices(words, k=12)).capitalize() + "." for _ in range(30))
        return " ".join(sentences)

    for start in range(0, pages, _BATCH):
        xml = build_export({f"Page {i}": write_text() for i in range(start, min(start + _BATCH, pages))})
        wiki.run_script("importDump.php", "--no-updates", text=xml)


@contextmanager
def following(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def wait_for_answer(wiki: Wiki, address: str, title: str, word: str) -> float:
    """Edit a page; return the seconds until a search finds the new word."""
    wiki.edit(title, f"The {word} is a weevil of this page. It is new.")
    start = time.monotonic()
    body = json.dumps({"questions": [word], "k": 1, "retriever": "bm25"})
    while time.monotonic() < start + 600:
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.request("POST", "/search", body, {"Content-Type": "application/json"})
        if word.encode() in connection.getresponse().read().partition(b'"hits"')[2]:
            return time.monotonic() - start
        connection.close()
        time.sleep(0.2)
    raise SystemExit(f"no answer has {word} after ten minutes")


def spend_day(
    wiki: Wiki, folder: Path, command: list[str], options: argparse.Namespace, draw: random.Random
) -> dict[str, Any]:
    costs, wiki_requests, edited_pages = [], 0, 0
    for build in range(options.builds):
        titles = [f"Page {draw.randrange(options.pages)}" for _ in range(options.day // options.builds)]
        for i, title in enumerate(titles):
            wiki.edit(title, f"Edit {build} {i} of this page says something else. It is new.")
        wiki.queries.clear()
        costs.append(run([*command, "--store", str(folder / "store")]))
        wiki_requests, edited_pages = wiki_requests + len(wiki.queries), edited_pages + len({*titles})
    full = run([*command, "--store", str(folder / "full")])
    cpu = statistics.mean(cost.cpu_seconds for cost in costs)
    return {
        "edits": options.day,
        "builds": options.builds,
        "requests": wiki_requests,
        "requests per changed page": round(wiki_requests / edited_pages, 3),
        "cpu of a build": round(cpu, 1),
        "cpu of a full build": round(full.cpu_seconds, 1),
        "ratio": round(cpu / full.cpu_seconds, 3),
        "peak_mb": round(max(cost.peak_mb for cost in costs)),
    }


if __name__ == "__main__":
    main()
