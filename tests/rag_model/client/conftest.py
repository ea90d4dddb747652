"""Fixtures of the service tests: a library and a model."""

from tests.rag_model.serving.conftest import cache, dest, model, shared_library

__all__ = ["cache", "dest", "model", "shared_library"]
