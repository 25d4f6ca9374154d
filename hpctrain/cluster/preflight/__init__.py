"""Preflight: facts of all nodes, compared with the site's preset and with each other.

`facts` reads one node, `rendezvous` brings the nodes together and compares their clocks,
`bounded` tries the shared directory, `checks` and `checks_between` judge (pure), `slow_nodes`
finds the nodes that make a collective slow (pure), `collective` alone imports torch, `node` runs
all of it. Nothing on a node is changed, and nothing is fetched. What cannot be read is unknown,
never ok.
"""
