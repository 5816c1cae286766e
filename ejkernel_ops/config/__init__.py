"""Caches, policies and the choice of a config."""
