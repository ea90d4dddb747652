"""Token vectors in codes, and MaxSim over them: late interaction (ColBERT)."""
