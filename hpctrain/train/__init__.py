"""What a training program uses: the step loop, engines, data and callbacks of other libraries."""
