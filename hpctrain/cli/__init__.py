"""The command line: parse, call, print, exit. Never imports torch."""
