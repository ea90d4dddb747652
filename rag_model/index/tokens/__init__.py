"""Token-vector indexes for late interaction (ColBERT).

* `kind`: the index kind `tokens`
* `codec`, `build`: encode token vectors, and write the index file
* `search`: the index file, and MaxSim over its passages
"""
