"""Answer requests in batches.

| module | content |
| --- | --- |
| `batcher` | the request queue, the worker threads, and partial answers for streams |
| `execution` | a batch of requests on one loaded snapshot |
| `loaded_snapshot` | an open snapshot with its retrievers, question encoder, reading model and readers |
| `available_retrievers` | which retrievers of a snapshot a service offers and has the memory for |
"""
