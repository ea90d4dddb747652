import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rag_model.encoders.encoder import Encoder, collect_question_encoder_files
from rag_model.encoders.files import derive_question_encoder_name, resolve_folder
from rag_model.encoders.space import check_same_space, compute_space
from rag_model.encoders.spec import EncoderSpec, read_encoder_spec
from rag_model.errors import InputError, RefusedError
from tests.fixtures.hub import Hub


def flat(files: dict[str, Path], folder: Path) -> Path:
    folder.mkdir()
    for name, path in files.items():
        shutil.copy(path, folder / name)
    return folder


def test_a_folder_is_itself(tiny_bert: Path) -> None:
    assert resolve_folder(tiny_bert) == resolve_folder(str(tiny_bert)) == tiny_bert.resolve()


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "a/b/c", "model", "intfloat/"])
def test_a_missing_folder_is_named_without_asking_the_hub(name: str) -> None:
    with pytest.raises(InputError, match="there is no model folder"):
        resolve_folder(name)


def test_a_hub_that_is_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"cannot be reached from here \(.*check the network, or give a local folder$"):
        resolve_folder("nobody/has-this-model")
    with pytest.raises(InputError, match=r"the demo extra holds this model, in the folder that"):
        resolve_folder("sentence-transformers/all-MiniLM-L6-v2")


def test_a_hub_without_the_model_asks_to_check_the_name(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    with pytest.raises(InputError, match=r"refuses the download \(.*check the name and the token"):
        resolve_folder("nobody/has-this-model")


def test_dpr_names_its_sibling() -> None:
    assert derive_question_encoder_name("/models/dpr-ctx_encoder-nq/") == "/models/dpr-question_encoder-nq"
    assert derive_question_encoder_name("intfloat/e5-small-v2") == "intfloat/e5-small-v2"


def test_a_shipped_question_encoder_loads_from_one_flat_folder(minilm: Path, tmp_path: Path) -> None:
    spec = EncoderSpec.from_json({**read_encoder_spec(minilm).to_json(), "max_length": 32, "question_prompt": "q: "})
    space = compute_space(minilm, spec, "minilm")
    files = collect_question_encoder_files(minilm, spec, space, tmp_path)
    assert sorted(files) == ["bookwheel.json", "config.json", "model.safetensors", "tokenizer.json"]
    shipped = Encoder.load(flat(files, tmp_path / "flat"), "question", dtype="float32")
    original = Encoder.load(minilm, "question", {"max_length": 32, "question_prompt": "q: "}, dtype="float32")
    assert shipped.spec == spec
    check_same_space(shipped.space(), space)
    np.testing.assert_array_equal(
        shipped.encode_questions(["who wrote Hamlet?"]), original.encode_questions(["who wrote Hamlet?"])
    )


def test_a_pairs_question_encoder_asks_where_it_declares(tiny_dpr: tuple[Path, Path], tmp_path: Path) -> None:
    passage, question = tiny_dpr
    spec = read_encoder_spec(passage, {"max_length": 64})
    space = compute_space(passage, spec, "tiny-dpr")
    undeclared = Encoder.load(question, "question", {"max_length": 64})
    with pytest.raises(RefusedError, match="dpr-question_encoder cannot search a snapshot of encoder tiny-dpr"):
        check_same_space(undeclared.space(), space)
    folder = flat(collect_question_encoder_files(question, spec, space, tmp_path), tmp_path / "flat")
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
