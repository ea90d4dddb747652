"""Token-vector indexes for late interaction (ColBERT).

* `kind`: the index kind `tokens`, and the stages that write its file
* `codec`: encodes token vectors
* `search`: the index file, and MaxSim over its passages
"""
