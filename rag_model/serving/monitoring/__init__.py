"""Monitor the service.

| module | content |
| --- | --- |
| `observer` | the events of a service |
| `metrics` | Prometheus metrics |
| `quality` | retrieval collapse, recall by exact search, and drift of live questions |
| `overrides` | whether answers come from the model's weights or from the passages |
| `probes` | whether the model's answers without passages change |
"""
