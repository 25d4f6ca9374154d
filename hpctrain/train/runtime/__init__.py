"""What a training program uses: the run and its step loop, stops, saves, trackers, the profiler."""
