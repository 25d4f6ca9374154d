"""A run as one reads it on a screen: its state, tables, words."""
