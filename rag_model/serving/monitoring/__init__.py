"""Monitor the service.

| module | content |
| --- | --- |
| `observer` | the events of a service |
| `metrics` | Prometheus metrics |
| `quality` | retrieval collapse, recall and drift of live questions, and the distance of two samples |
| `recall_check` | exact search for sampled questions |
| `overrides` | whether answers come from the model's weights or from the passages |
"""
