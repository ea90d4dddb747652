import pytest

from rag_model.store.versions.model_manifest import detect_model_parts


@pytest.mark.parametrize(
    ("paths", "parts"),
    [
        (["README.md", "question/config.json", "passage/config.json"], {"question", "passage"}),
        (["question/config.json", "generator/model.safetensors"], {"question", "generator"}),
        (
            ["model.safetensors", "question_encoder_tokenizer/a.json", "generator_tokenizer/b.json"],
            {"question", "generator"},
        ),
        (["words/model.safetensors"], {"words"}),
        (["model.safetensors"], set()),
    ],
)
def test_parts_are_detected_by_folders_and_tokenizers(paths: list[str], parts: set[str]) -> None:
    assert detect_model_parts(paths) == parts
