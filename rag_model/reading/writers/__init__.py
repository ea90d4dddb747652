"""What continues a prompt: a model in memory, or one behind an HTTP API."""
