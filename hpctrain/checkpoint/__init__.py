"""Checkpoints are committed or not there: names, manifest, commit, choice, proof, retention.

Only `boxes`, `save`, `saver`, `restore` and `dcp` import torch; the rest works on a login node.
"""
