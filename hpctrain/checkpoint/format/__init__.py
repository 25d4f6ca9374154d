"""A checkpoint's bytes: manifest, chunk table, shards, verified reading."""
