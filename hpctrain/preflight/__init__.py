"""A preflight: facts of all nodes, held against the site and against each other.

`probe` reads one node, `rendezvous` brings the nodes together, `checks` and its siblings judge
(pure), `shared` tries the shared directory, `slow_nodes` finds the nodes that make a collective
slow (pure), `collective` is the only module that imports torch; `run` is the order of all that.
Nothing on a node is changed, and nothing is fetched from anywhere. What cannot be read is unknown,
never ok.
"""
