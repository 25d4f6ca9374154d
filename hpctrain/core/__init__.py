"""What every room uses: settings, errors, the terminal, files, clocks and this rank's place."""
