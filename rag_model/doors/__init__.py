"""Retrievers for other frameworks, each a file: over a store, a pulled folder or a running service.

| framework | class |
| --- | --- |
| LangChain | `langchain.BookwheelRetriever` |
| LlamaIndex | `llamaindex.BookwheelRetriever` |
| Haystack | `haystack.BookwheelRetriever` |

They only translate: `source` says what they ask; `local`, `following` and `remote` answer.
"""
