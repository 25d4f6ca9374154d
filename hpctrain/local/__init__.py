"""The embedded cluster: nodes are processes of this machine.

For laptops, demos, and runs without SLURM.
"""
