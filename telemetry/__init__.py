"""What every process of the fleet needs to tell of itself. Imports nothing of ours."""
