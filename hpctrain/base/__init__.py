"""The ground: files, locks, processes, meshes, texts; the standard library alone."""
