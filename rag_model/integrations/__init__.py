"""Retrievers for other frameworks, over a store, a pulled folder or a running service.

| module | content |
| --- | --- |
| `langchain`, `llamaindex`, `haystack` | a `BookwheelRetriever` for the framework |
| `source` | the passages of a snapshot or of a service, and the settings that choose between them |
| `following` | the passages of a ref that is followed |
"""
