"""Copies elsewhere: pull and export, what a puller has already, stamps of verified files, pruning."""
