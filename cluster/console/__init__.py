"""The parts of the `lorafleet` command: a client of the control API and a terminal. Knows no Ray and no torch."""
