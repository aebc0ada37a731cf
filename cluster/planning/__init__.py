"""How a fleet would behave: workloads, routing policies and a discrete-event simulation. No Ray, no torch."""
