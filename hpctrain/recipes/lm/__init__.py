"""A decoder-only language model on the bytes of any folder of text files."""
