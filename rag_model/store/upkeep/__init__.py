"""What must go and what must hold: expire, collect garbage, verify."""
