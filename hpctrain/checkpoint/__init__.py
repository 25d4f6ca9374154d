"""Checkpoints are committed or not there: names, manifest, commit, choice, proof, retention.

Only `store.py` imports torch; everything else works on a login node.
"""
