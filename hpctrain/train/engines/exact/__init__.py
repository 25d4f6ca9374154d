"""The engine whose bits do not depend on how many ranks there are."""
