"""Evaluations as versions in the store: what identifies one, its files, and one beside another."""
