import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rag_model.encoders.encoder import Encoder, collect_question_encoder_files
from rag_model.encoders.files import derive_question_encoder_name, find_hub_name, pin_hub_name, resolve_folder
from rag_model.encoders.space import check_same_space, compute_space
from rag_model.encoders.spec import EncoderSpec, find_known_settings, read_encoder_spec
from rag_model.encoders.weights import digest_weights
from rag_model.errors import InputError, RefusedError, UsageError
from rag_model.training.origins import InitialModels
from tests.fixtures.hub import Hub


def copy_flat(files: dict[str, Path], folder: Path) -> Path:
    folder.mkdir()
    for name, path in files.items():
        shutil.copy(path, folder / name)
    return folder


def test_local_folder_resolves_to_itself(tiny_bert: Path) -> None:
    assert resolve_folder(tiny_bert) == resolve_folder(str(tiny_bert)) == tiny_bert.resolve()


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "a/b/c", "model", "intfloat/"])
def test_a_missing_folder_is_named_without_asking_the_hub(name: str) -> None:
    with pytest.raises(InputError, match="there is no model folder"):
        resolve_folder(name)


def test_unreachable_hub_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"cannot be reached from here \(.*check the network, or give a local folder$"):
        resolve_folder("unknown/missing-model")
    with pytest.raises(InputError, match=r"the demo extra holds this model, in the folder that"):
        resolve_folder("sentence-transformers/all-MiniLM-L6-v2")


def test_a_hub_without_the_model_asks_to_check_the_name(hub: Hub) -> None:
    with pytest.raises(InputError, match=r"refuses the download \(.*check the name and the token"):
        resolve_folder("unknown/missing-model")


@pytest.fixture
def models(hub: Hub, tiny_bert: Path) -> Hub:
    """Add `me/tiny` to the hub: pickled weights on main, safetensors in a pull request, a branch and a tag."""
    files = {path.name: path.read_bytes() for path in tiny_bert.iterdir()}
    weights = {"model.safetensors": files.pop("model.safetensors")}
    repository = hub.add("models/me/tiny", {**files, "pytorch_model.bin": b"anything"})
    for branch in ("refs/pr/3", "dev", "v1.0"):
        repository.commit({**files, **weights}, branch)
    return hub


@pytest.mark.parametrize("revision", ["refs/pr/3", "dev", "v1.0", "COMMIT"])
def test_a_revision_is_read_and_names_its_commit(
    models: Hub, tiny_bert: Path, revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = models.repositories["models/me/tiny"].branches["dev" if revision == "COMMIT" else revision]
    name = f"me/tiny@{commit if revision == 'COMMIT' else revision}"
    folder = resolve_folder(name)
    assert pin_hub_name(name) == find_hub_name(folder) == f"me/tiny@{commit}"
    assert digest_weights(folder) == digest_weights(tiny_bert)
    assert not [path for path in folder.iterdir() if path.suffix == ".bin"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read from the cache
    assert resolve_folder(name) == resolve_folder(f"me/tiny@{commit}") == folder


def test_a_revision_that_does_not_exist_is_named(models: Hub) -> None:
    with pytest.raises(InputError, match=r"^model me/tiny has no revision refs/pr/9 on the hub: give a branch, a tag"):
        resolve_folder("me/tiny@refs/pr/9")


@pytest.mark.parametrize("name", ["me/tiny@", "me/tiny@../x", "me/tiny@a b", "me/tiny@main/"])
def test_a_revision_that_git_does_not_allow_is_refused_before_a_request(models: Hub, name: str) -> None:
    with pytest.raises(InputError, match="has no valid revision after the @"):
        resolve_folder(name)
    assert not models.request_lines


def test_error_of_pickled_weights_names_both_solutions(models: Hub) -> None:
    with pytest.raises(InputError, match=r"a revision that has safetensors, such as me/tiny@refs/pr/3, or convert"):
        Encoder.load("me/tiny")


def test_the_models_of_a_training_are_pinned(models: Hub, tiny_bert: Path) -> None:
    commit = models.repositories["models/me/tiny"].branches["dev"]
    origins = InitialModels({"question": "me/tiny@dev", "passage": str(tiny_bert)}).pin()
    assert origins.names == {"question": f"me/tiny@{commit}", "passage": str(tiny_bert)}
    models.repositories["models/me/tiny"].commit({"config.json": b"{}"}, "dev")
    assert origins.list_sources() == origins.names
    assert len(set(origins.digests().values())) == 1, "the commit has the files of the folder"


def test_settings_of_a_family_hold_for_every_revision() -> None:
    assert find_known_settings("intfloat/e5-small-v2@refs/pr/3") == find_known_settings("intfloat/e5-small-v2")


def test_the_revision_of_a_passage_encoder_names_no_question_encoder() -> None:
    with pytest.raises(UsageError, match=r'question_encoder = "facebook/dpr-question_encoder-single-nq-base@REVISION"'):
        derive_question_encoder_name("facebook/dpr-ctx_encoder-single-nq-base@refs/pr/3")
    assert derive_question_encoder_name("intfloat/e5-small-v2@main") == "intfloat/e5-small-v2@main"
    assert derive_question_encoder_name("/a@b/dpr-ctx_encoder-nq") == "/a@b/dpr-question_encoder-nq"


def test_dpr_names_its_sibling() -> None:
    assert derive_question_encoder_name("/models/dpr-ctx_encoder-nq/") == "/models/dpr-question_encoder-nq"
    assert derive_question_encoder_name("intfloat/e5-small-v2") == "intfloat/e5-small-v2"


def test_a_shipped_question_encoder_loads_from_one_flat_folder(minilm: Path, tmp_path: Path) -> None:
    spec = EncoderSpec.from_json({**read_encoder_spec(minilm).to_json(), "max_length": 32, "question_prompt": "q: "})
    space = compute_space(minilm, spec, "minilm")
    files = collect_question_encoder_files(minilm, spec, space, tmp_path)
    assert sorted(files) == ["bookwheel.json", "config.json", "model.safetensors", "tokenizer.json"]
    shipped = Encoder.load(copy_flat(files, tmp_path / "flat"), "question", dtype="float32")
    original = Encoder.load(minilm, "question", {"max_length": 32, "question_prompt": "q: "}, dtype="float32")
    assert shipped.spec == spec
    check_same_space(shipped.space(), space)
    np.testing.assert_array_equal(
        shipped.encode_questions(["who wrote Hamlet?"]), original.encode_questions(["who wrote Hamlet?"])
    )


def test_question_encoder_of_a_pair_needs_a_declared_space(tiny_dpr: tuple[Path, Path], tmp_path: Path) -> None:
    passage, question = tiny_dpr
    spec = read_encoder_spec(passage, {"max_length": 64})
    space = compute_space(passage, spec, "tiny-dpr")
    undeclared = Encoder.load(question, "question", {"max_length": 64})
    with pytest.raises(RefusedError, match="dpr-question_encoder cannot search a snapshot of encoder tiny-dpr"):
        check_same_space(undeclared.space(), space)
    folder = copy_flat(collect_question_encoder_files(question, spec, space, tmp_path), tmp_path / "flat")
    check_same_space(Encoder.load(folder, "question").space(), space)


def test_each_half_of_a_pair_knows_its_role(tiny_dpr: tuple[Path, Path]) -> None:
    with pytest.raises(InputError, match="is DPR's passage encoder: give the question encoder"):
        Encoder.load(tiny_dpr[0], "question")
    with pytest.raises(InputError, match="is DPR's question encoder: give the passage encoder"):
        Encoder.load(tiny_dpr[1], "passage")


def test_spaces_are_known_without_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'tokenizers', 'safetensors', 'huggingface_hub'):\n"
        "    sys.modules[name] = None\n"
        "from rag_model.encoders import embed, encoder, files, space, spec, weights\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
