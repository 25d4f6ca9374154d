"""What a training program uses: world, stop agreement, the step loop, RNG, logging."""
