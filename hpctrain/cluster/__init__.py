"""What hpctrain knows of a cluster: its scheduler, presets, network settings and the fitness of its nodes."""
