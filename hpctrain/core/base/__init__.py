"""The ground: files, locks, processes, meshes, texts; by the standard library alone."""

VERSION = "0.2.0.dev0"
"""Of this package; `hpctrain.__version__` is the name for users."""
