"""Is every node fit to train? Facts of all nodes, held against the site and against each other.

`probe` reads one node, `meeting` brings the nodes together, `checks` judges (pure), `shared` tries
the shared directory, `search` finds the nodes that make a collective slow (pure), `collective` is
the only module that imports torch. Nothing on a node is changed, and nothing is fetched from
anywhere. What cannot be read is unknown, never ok.
"""
