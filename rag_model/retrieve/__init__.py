"""Questions in, ranked and credited passages out: `factory.open_retriever` opens every way of finding them.

Each way is a file (`dense`, `fusion`, `rerank`) that finds rows; `found` makes hits of them. `expression` reads what
users write, `composer` builds it, `survey` says what it needs before anything is opened.
"""
