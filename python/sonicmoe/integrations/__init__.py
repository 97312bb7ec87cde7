"""Adapters that switch the layer on in training frameworks; each imports its framework itself."""
