"""SiDR: weighted terms that ask an index of weights, or one of bags of tokens."""
