"""Serve a snapshot over HTTP or MCP, in batches, and follow its ref without a pause.

| module | content |
| --- | --- |
| `run` | the process of `bookwheel serve` |
| `mcp_server` | the process of `bookwheel serve --mcp` |
| `service` | the service without a transport |
| `http` | endpoints, connections, authentication, the uvicorn server |
| `answering` | batches of requests, and the loaded snapshot and model that answer them |
| `following` | polling of a ref or a folder, trials of new versions, the swap |
| `monitoring` | Prometheus metrics, and the quality of live answers |
| `settings`, `runtime` | settings, threads and logging |
"""
