"""How a model is trained on so many GPUs: strategies, their memory and time, which fits."""
