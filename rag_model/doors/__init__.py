"""Retrievers for other frameworks, over a store, a pulled folder or a running service; each is a file of its own.

| framework | class |
| --- | --- |
| LangChain | `langchain.BookwheelRetriever` |
| LlamaIndex | `llamaindex.BookwheelRetriever` |
| Haystack | `haystack.BookwheelRetriever` |

They only translate: `source` says what they ask, `local` and `remote` answer.
"""
