"""Retrievers for other frameworks, over a store, a pulled folder or a running service.

| module | content |
| --- | --- |
| `langchain`, `llamaindex`, `haystack` | a `BookwheelRetriever` for the framework |
| `source` | the passages of a snapshot, a followed ref or a service, and their settings |
"""
