"""An HTTP client of the service: `Client(url).search(["Who wrote Faust?"])`.

It imports neither faiss nor torch.

`client` sends requests and retries them; `replies` defines the types of the replies.
"""

from rag_model.client.client import Client, ClientSettings

__all__ = ["Client", "ClientSettings"]
