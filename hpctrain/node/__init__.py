"""What runs on a node beside the ranks: the agent and the processes that it starts."""
