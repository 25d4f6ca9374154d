"""What hpctrain knows of a cluster: scheduler, presets, network settings, fitness of nodes."""
