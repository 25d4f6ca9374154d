"""DeepSpeed's ZeRO below our engine's seam."""
