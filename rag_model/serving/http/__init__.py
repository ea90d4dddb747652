"""The HTTP transport.

| module | content |
| --- | --- |
| `app` | the endpoints and the web page |
| `messages` | the JSON of requests and replies |
| `streaming` | answers as server-sent events |
| `guard` | checks of host, origin, token and content type |
| `connections` | limits of connections |
| `server` | sockets, TLS, signals, shutdown |
"""
