"""One script a question; the figures lie in `results/` with machine, versions and commit."""
