"""Take the README's screenshots of the search page and of a build report.

`python docs/pictures.py STORE`, where STORE is the store of `bookwheel demo`. Needs Chromium.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).parents[1]))

from rag_model.store import Store
from tests.fixtures.browser import open_page

FOLDER = Path(__file__).parent / "images"
QUESTION = "What is the tallest mountain in Alaska?"
VIEWPORT = {"width": 960, "height": 640}


def take_pictures(store: str) -> None:
    """Write `search.png` and `report.png`."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as dest, open_page(viewport=VIEWPORT) as page:
        bookwheel = Path(sys.executable).with_name("bookwheel")
        command = [bookwheel, "serve", "--store", store, "--dest", dest, "--port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:
            assert service.stderr is not None
            lines = iter(service.stderr.readline, "")
            address = next(line.split()[-1] for line in lines if line.startswith("serving "))
            page.goto(f"{address}/#q={quote(QUESTION)}&k=3&by={quote('rrf(hnsw, bm25)')}")
            page.locator(".passage").first.wait_for()
            page.screenshot(path=FOLDER / "search.png")
            service.terminate()
        snapshot = Store.open(store).snapshots.resolve("latest")
        page.goto((Path(store).resolve() / "reports" / f"{snapshot}.html").as_uri())
        page.screenshot(path=FOLDER / "report.png")


if __name__ == "__main__":
    take_pictures(sys.argv[1])
