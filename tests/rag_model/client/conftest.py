"""The fixtures of the service tests, which tests of the client use, too."""

from tests.rag_model.serving.conftest import cache, dest, model, shared_library

__all__ = ["cache", "dest", "model", "shared_library"]
