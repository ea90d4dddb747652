"""Answer requests in batches.

| module | content |
| --- | --- |
| `batcher` | the request queue, the worker threads, and partial answers for streams |
| `execution` | a batch of requests on one loaded snapshot |
| `loaded_snapshot` | an open snapshot with its retrievers and readers, and the memory for it |
| `served_model` | the question encoder and the reading model, which snapshots share |
"""
