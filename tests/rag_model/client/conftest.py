"""The library and the model of the service's tests."""

from tests.rag_model.serving.conftest import cache, dest, made_library, model

__all__ = ["cache", "dest", "made_library", "model"]
