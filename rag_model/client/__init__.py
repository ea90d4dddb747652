"""A client of the service over HTTP: `Client(url).search(["Who wrote Faust?"])`. It imports neither faiss nor torch."""

from rag_model.client.client import Client
from rag_model.client.settings import ClientSettings

__all__ = ["Client", "ClientSettings"]
