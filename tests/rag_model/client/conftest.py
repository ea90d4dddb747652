"""The library and the model of the service's tests."""

from tests.rag_model.serving.conftest import cache, dest, model, shared_library

__all__ = ["cache", "dest", "model", "shared_library"]
