"""Engines: how a model is parallelised, and how its state is named. One on-disk format for all of them."""
