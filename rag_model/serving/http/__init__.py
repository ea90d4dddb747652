"""The HTTP transport.

| module | content |
| --- | --- |
| `app` | the endpoints, answers as server-sent events, and the web page |
| `messages` | the JSON of requests and replies |
| `guard` | checks of host, origin, token and content type |
| `connections` | limits of connections |
| `server` | sockets, TLS, signals, shutdown |
"""
