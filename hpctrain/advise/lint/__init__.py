"""A static checker for distributed training programs and their DeepSpeed configurations.

Pure: from a source text to findings. It reads the syntax tree of Python's own `ast`, follows names
through it, and imports neither torch nor the program ([docs/check.md]). `hpctrain.cli.lint` is the
edge.
"""
